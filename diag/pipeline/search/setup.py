"""What `rank` and `pin` set up before the first trial: plan, candidates, data, switchable graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diag
from diag.calibration.table import CalibrationTable, write_table
from diag.engines import onnxruntime as ort_engine
from diag.engines.reference import Trust, examine
from diag.engines.switchable import Switchable
from diag.errors import NotEnoughEvidenceError, UsageError
from diag.feeds import open_feeds
from diag.feeds.source import Batch
from diag.files import output_folder
from diag.gate.threshold import require_outputs
from diag.model import shapes
from diag.model.graph import Model
from diag.numerics.table import METRICS
from diag.pipeline.compare.kinds import require_metrics, tensor_kinds
from diag.pipeline.prepare import Planned, before_last_third, calibrate, choose_plan, plan_on
from diag.pipeline.search.cheap import CheapScores, cheap_scores
from diag.pipeline.search.outcome import BY_CHANNEL
from diag.pipeline.search.prices import Prices, open_prices
from diag.pipeline.search.ranking_file import RankingFile, read_ranking
from diag.pipeline.search.screen import MOST_CANDIDATES, looked_at, screened
from diag.pipeline.search.settings import TRIALS_FILE, SearchSettings
from diag.pipeline.search.trials import TrialStore
from diag.pipeline.search.user_metric import UserMetric, open_metric
from diag.pipeline.search.variants import Variants
from diag.plan.schema import plan_sha256
from diag.progress import Progress
from diag.search.pins import candidates_of
from diag.search.rank import Candidate
from diag.search.target import Target
from diag.typed.apply import TypedModel


@dataclass(frozen=True)
class Search:
    """Everything that both commands set up."""

    settings: SearchSettings
    planned: Planned
    candidates: list[Candidate]
    variants: Variants
    target: Target
    chosen: tuple[int, ...]
    """Batches to rank and choose on."""
    held_out: tuple[int, ...]
    key: str
    """Identity of weights, plan, table and data."""
    table: str
    """Path of the calibration table used, empty when the plan needs none."""
    prices: Prices
    trust: Trust
    """What the first batch told of the reference."""
    scores: CheapScores | None = None
    """Those by which the candidates were screened."""
    ranked: RankingFile | None = None
    """The ranking that the user handed in."""

    @property
    def ids(self) -> frozenset[str]:
        """All candidates."""
        return frozenset(c.id for c in self.candidates)

    @property
    def batches(self) -> int:
        """Batches that choose and those that prove, together."""
        return len({*self.chosen, *self.held_out})

    @property
    def all_judge(self) -> bool:
        """Whether no batch is held out: all were needed to choose."""
        return len(self.held_out) == self.batches

    def low(self, raised: Collection[str] = ()) -> frozenset[str]:
        """Layers that stay lowered when the candidates of these ids are raised."""
        return frozenset().union(*(c.layers for c in self.candidates if c.id not in raised))


@dataclass(frozen=True)
class _Data:
    batches: list[Batch]
    labels: list[Batch]
    chosen: tuple[int, ...]
    held_out: tuple[int, ...]
    sha256: str


def set_up(
    settings: SearchSettings, progress: Progress, candidates: Sequence[Candidate] | None = None
) -> Search:
    """Read and check everything, and build the switchable graph. Raises what each of its steps raises.

    `candidates`: those of a search of the same settings, whose part this one is.
    """
    if not settings.target:
        raise UsageError("a search needs a target", 'For example: --target "sqnr_db>=30".')
    _refuse_price(settings)
    out = output_folder(settings.out)
    metric = _metric(settings)
    planned = plan_on(settings.model, choose_plan(settings.plan, settings.format))
    model = planned.model
    outputs = [n for n, info in model.outputs.items() if info.is_float]
    require_outputs(settings.target, outputs)
    data = _data(settings, model)
    progress.start("examining the FP32 reference", None)
    trust = examine(model, data.batches[0], planned.types)
    kinds = tensor_kinds(planned, trust)
    require_metrics(settings.target, outputs, kinds)
    table, table_path = _table(settings, planned, out, progress)
    ranges = table.model_dump_json() if table else ""
    key = _key(planned, data.sha256, ranges, metric.sha256 if metric else "")
    typed = planned.apply(table)
    ranked = _ranking(settings, key, typed)
    target = Target(settings.target)

    def scored(candidates: Sequence[Candidate]) -> CheapScores:
        batches = looked_at(data.batches)
        return cheap_scores(planned, typed.model, candidates, batches, trust, target, table, progress)

    scores = None
    if candidates is None:
        candidates, scores = _chosen(planned, typed, ranked, scored, progress)
    switchable = _switchable(planned, typed, candidates, progress)
    # What is lowered throughout is part of every trial; it depends on the ranking that was handed in.
    by_channel = any(t.metric == BY_CHANNEL for t in settings.target)
    store = TrialStore(out / TRIALS_FILE, "\n".join([key, f"{by_channel}", *sorted(switchable.always_low)]))
    variants = Variants(switchable, data.batches, kinds, store, metric, data.labels, by_channel)
    shaped = {name: tuple(array.shape) for name, array in data.batches[0].items()}
    concrete = shapes.infer(model, shapes.bind(model, shaped), trust.shape_values)
    return Search(
        settings,
        planned,
        list(candidates),
        variants,
        target,
        data.chosen,
        data.held_out,
        key,
        table_path,
        open_prices(settings.prices, model, concrete, planned.plan.base),
        trust,
        scores,
        ranked,
    )


def _table(
    settings: SearchSettings, planned: Planned, out: Path, progress: Progress
) -> tuple[CalibrationTable | None, str]:
    """The calibration table and its path: the user's, or one that is measured and written into `out`."""
    labelled = settings.metric is not None
    feeds = open_feeds(settings.data, planned.model.inputs, settings.limit, labelled=labelled)
    table, _ = calibrate(planned, feeds, settings.calibration, progress)
    if table is None or settings.calibration:
        return table, settings.calibration or ""
    path = out / "calibration.json"
    write_table(table, path)
    return table, str(path)


def _ranking(settings: SearchSettings, key: str, typed: TypedModel) -> RankingFile | None:
    if settings.ranking is None:
        return None
    lowered = {name for name, fmt in typed.formats.items() if fmt != "fp32"}
    return read_ranking(settings.ranking, key, lowered)


def _metric(settings: SearchSettings) -> UserMetric | None:
    """The user's own metric. Raises UsageError for a metric that nobody computes, or that no target names."""
    metric = open_metric(settings.metric) if settings.metric is not None else None
    unknown = [t.metric for t in settings.target if t.metric not in METRICS]
    if unknown and (metric is None or unknown[0] != metric.name):
        raise UsageError(
            f"nothing computes the target's metric {unknown[0]!r}", "Give --metric FILE.py:NAME."
        )
    if metric is not None and not unknown:
        raise UsageError(
            f"no target names {metric.name!r}, which --metric computes",
            f'Give --target "{metric.name}>=NUMBER" too, or leave --metric out.',
        )
    return metric


def _refuse_price(settings: SearchSettings) -> None:
    """A search may take hours: say at its start that what it would end in has no measure."""
    if settings.ceiling.price_ms is not None and not settings.prices:
        raise UsageError(
            "a price in ms needs measured prices", "Give --prices REPORT, or a share such as 10%."
        )


def _data(settings: SearchSettings, model: Model) -> _Data:
    """All batches, and which of them choose and which prove."""
    labelled = settings.metric is not None
    feeds = open_feeds(settings.data, model.inputs, settings.limit, labelled=labelled)
    pairs, sha256 = list(feeds.with_labels()), feeds.sha256
    if settings.holdout is None:
        chosen, held_out = _split(len(pairs))
    else:
        extra = open_feeds(settings.holdout, model.inputs, settings.limit, labelled=labelled)
        more = list(extra.with_labels())
        chosen = tuple(range(len(pairs)))
        held_out = tuple(range(len(pairs), len(pairs) + len(more)))
        pairs, sha256 = pairs + more, f"{sha256}+{extra.sha256}"
    return _Data([b for b, _ in pairs], [labels for _, labels in pairs], chosen, held_out, sha256)


def _split(batches: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last third of the batches is held out."""
    if batches < 2:
        raise NotEnoughEvidenceError(
            "one batch cannot both choose pins and prove them",
            "Give at least 2 batches (6 or more are better).",
        )
    kept = before_last_third(batches)
    return tuple(range(kept)), tuple(range(kept, batches))


def _chosen(
    planned: Planned,
    typed: TypedModel,
    ranked: RankingFile | None,
    scored: Callable[[Sequence[Candidate]], CheapScores],
    progress: Progress,
) -> tuple[list[Candidate], CheapScores | None]:
    """The candidates, and their scores where there are so many that they are screened."""
    candidates = ranked.candidates() if ranked else _candidates(planned, typed.formats)
    if ranked is not None or len(candidates) <= MOST_CANDIDATES:
        return candidates, None
    scores = scored(candidates)
    return screened(candidates, scores, progress), scores


def _switchable(
    planned: Planned, typed: TypedModel, candidates: Sequence[Candidate], progress: Progress
) -> Switchable:
    """The graph in which each candidate can be raised."""
    switches = frozenset().union(*(c.layers for c in candidates))
    lowered = frozenset(n for n, fmt in typed.formats.items() if fmt != "fp32")
    progress.start("building the switchable graph", None)
    return Switchable(planned.model, typed.model, planned.types, switches, lowered - switches)


def _candidates(planned: Planned, formats: Mapping[str, str]) -> list[Candidate]:
    """Groups of layers that the plan lowers, in graph order."""
    lowered = [n for n, fmt in formats.items() if fmt != "fp32" and fmt != planned.plan.base]
    if not lowered:
        raise UsageError("the plan lowers no layer: there is nothing to rank", "Give --format int8 or fp16.")
    groups = [(g.kind, g.layers) for g in planned.resolver.groups if g.kind in ("norm", "shared_input")]
    return candidates_of(lowered, groups)


def _key(planned: Planned, *parts: str) -> str:
    texts = (
        *(diag.__version__, ort_engine.version(), planned.model.sha256, plan_sha256(planned.plan)),
        *parts,
    )
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
