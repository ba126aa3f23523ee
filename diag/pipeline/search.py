"""`rank` and `pin`: which layers do the damage, and the smallest set that must stay in higher precision."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diag
from diag.calibration.table import write_table
from diag.engines.reference import examine
from diag.engines.switchable import Switchable
from diag.errors import NotEnoughEvidenceError, UsageError
from diag.feeds import open_feeds
from diag.files import output_folder, write_text
from diag.gate.threshold import Threshold, require_outputs
from diag.model.graph import Model
from diag.pipeline.assemble import tensor_kinds
from diag.pipeline.compare import compare
from diag.pipeline.prepare import Planned, calibrate, choose_plan, plan_on, read_scales
from diag.pipeline.screen import MOST_CANDIDATES, screened
from diag.pipeline.settings import CompareSettings
from diag.pipeline.trials import Metrics, TrialStore
from diag.pipeline.variants import Variants
from diag.plan.schema import Plan, pin_for, plan_sha256, write_plan
from diag.progress import Progress
from diag.report.schema import Finding, Mend, PinInfo, Report
from diag.search.pins import PinSearch, candidates_of, find_pins, unstable_pins
from diag.search.rank import Candidate, Effect, Ranking, rank
from diag.search.target import Target

TRIALS_FILE = ".trials.sqlite"
RANKING_FILE = "ranking.json"
RANKING_SCHEMA = "trtdiag.ranking/1"
_SLACKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Factors by which the damage must stay under the target's while choosing, tried in turn."""

_RAISED_FORMATS = ("fp16", "bf16", "fp32")
"""In the order of their price; the first that holds the target is taken."""


@dataclass(frozen=True)
class SearchSettings:
    """Options of `rank` and `pin`, in their terms."""

    model: str
    data: str
    out: str
    target: tuple[Threshold, ...]
    plan: str | None = None
    format: str | None = None
    calibration: str | None = None
    holdout: str | None = None
    limit: int | None = None
    budget_s: float = math.inf
    command: str = "trtdiag pin"


@dataclass(frozen=True)
class _Search:
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
    table: str
    """Path of the calibration table used, empty when the plan needs none."""


def rank_layers(settings: SearchSettings, progress: Progress) -> Ranking:
    """Measure every group of lowered layers alone, both ways, and write ranking.json into `settings.out`."""
    search = _set_up(settings, progress)
    return _ranked(search, progress)


@dataclass(frozen=True)
class PinResult:
    """What `pin` found and proved."""

    search: PinSearch
    ranking: Ranking
    report: Report | None
    """Comparison of the final plan on the held-out batches; None when nothing meets the target."""
    format: str
    held_out: Metrics
    rivals: dict[str, Metrics]
    """All-FP16 and all-BF16 on the held-out batches."""
    unstable: list[str]
    trials: int
    forward_equivalents: float


def pin_layers(settings: SearchSettings, progress: Progress) -> PinResult:
    """Find, verify on held-out batches and write the smallest set of pins that meets the target.

    Writes ranking.json, plan.yaml, typed.onnx, report.json and report.html into `settings.out`.
    Raises NotEnoughEvidenceError when there are too few batches to hold any out.
    """
    search = _set_up(settings, progress)
    ranking = _ranked(search, progress)
    progress.start("choosing pins", None)
    found = _found(search, ranking, progress)
    fmt, held_out = _raised_format(search, found, progress)
    rivals = {name: _plan_metrics(search, _plain(search, name)) for name in ("fp16", "bf16")}
    report = _prove(search, found, ranking, fmt, progress) if found.outcome != "impossible" else None
    unstable = unstable_pins(found.pins, ranking.effects) if found.outcome == "found" else []
    return PinResult(
        found,
        ranking,
        report,
        fmt,
        held_out,
        rivals,
        unstable,
        search.variants.trials,
        search.variants.forward_equivalents,
    )


def _set_up(settings: SearchSettings, progress: Progress) -> _Search:
    if not settings.target:
        raise UsageError("a search needs a target", 'For example: --target "sqnr_db>=30".')
    out = output_folder(settings.out)
    planned = plan_on(settings.model, choose_plan(settings.plan, settings.format))
    model = planned.model
    require_outputs(settings.target, [n for n, info in model.outputs.items() if info.is_float])
    feeds = open_feeds(settings.data, model.inputs, settings.limit)
    batches = list(feeds)
    chosen, held_out = _split(len(batches))
    if settings.holdout is not None:
        extra = list(open_feeds(settings.holdout, model.inputs, settings.limit))
        chosen = tuple(range(len(batches)))
        held_out = tuple(range(len(batches), len(batches) + len(extra)))
        batches += extra
    progress.start("examining the FP32 reference", None)
    trust = examine(model, batches[0], planned.types)
    table, _ = calibrate(planned, feeds, settings.calibration, progress)
    table_path = settings.calibration or ""
    if table is not None and not table_path:
        table_path = str(out / "calibration.json")
        write_table(table, Path(table_path))
    typed = planned.apply(table)
    lowered_model = Model("typed", typed.proto, typed.weights, "")
    candidates = _candidates(planned, typed.formats)
    if len(candidates) > MOST_CANDIDATES:
        candidates = screened(planned, lowered_model, candidates, batches[0], trust, progress)
    switches = frozenset().union(*(c.layers for c in candidates))
    lowered = frozenset(n for n, fmt in typed.formats.items() if fmt != "fp32")
    progress.start("building the switchable graph", None)
    switchable = Switchable(model, lowered_model, planned.types, switches, lowered - switches)
    key = _key(planned, feeds.sha256, table.model_dump_json() if table else "", settings.holdout or "")
    variants = Variants(switchable, batches, tensor_kinds(planned, trust), TrialStore(out / TRIALS_FILE, key))
    return _Search(
        settings, planned, candidates, variants, Target(settings.target), chosen, held_out, key, table_path
    )


def _split(batches: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last third of the batches is held out."""
    if batches < 2:
        raise NotEnoughEvidenceError(
            "one batch cannot both choose pins and prove them",
            "Give at least 2 batches (6 or more are better).",
        )
    kept = batches - max(1, batches // 3)
    return tuple(range(kept)), tuple(range(kept, batches))


def _candidates(planned: Planned, formats: Mapping[str, str]) -> list[Candidate]:
    """Groups of layers that the plan lowers, in graph order."""
    lowered = [n for n, fmt in formats.items() if fmt != "fp32" and fmt != planned.plan.base]
    if not lowered:
        raise UsageError("the plan lowers no layer: there is nothing to rank", "Give --format int8 or fp16.")
    groups = [(g.kind, g.layers) for g in planned.resolver.groups if g.kind in ("norm", "shared_input")]
    return candidates_of(lowered, groups)


def _key(planned: Planned, *parts: str) -> str:
    texts = (diag.__version__, planned.model.sha256, plan_sha256(planned.plan), *parts)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _ranked(search: _Search, progress: Progress) -> Ranking:
    ranking = rank(
        search.candidates,
        lambda low, batch: search.variants.damage(search.target, low, batch),
        search.chosen,
        progress,
        search.settings.budget_s,
    )
    write_text(json.dumps(ranking_body(search.key, ranking, search.planned), indent=1), _ranking_path(search))
    return ranking


def _ranking_path(search: _Search) -> Path:
    return Path(search.settings.out) / RANKING_FILE


def ranking_body(key: str, ranking: Ranking, planned: Planned) -> dict[str, Any]:
    """The ranking as plain data; damages that are not finite are written as null."""

    def row(effect: Effect) -> dict[str, Any]:
        layer = effect.candidate.id
        role = planned.roles[layer]
        return {
            "layers": sorted(effect.candidate.layers, key=lambda n: planned.model.layer_by_id[n].index),
            "role": role.name,
            "block": role.block,
            "lowered_damage": _finite(effect.lowered_mean),
            "raised_gain": _finite(effect.raised_mean),
            "relative_spread": _finite(effect.spread),
        }

    return {
        "schema": RANKING_SCHEMA,
        "key": key,
        "total_damage": _finite(ranking.total),
        "batches": ranking.batches,
        "settled": ranking.settled,
        "kendall_tau": ranking.kendall_tau,
        "groups": [row(effect) for effect in ranking.effects],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _found(search: _Search, ranking: Ranking, progress: Progress) -> PinSearch:
    """Pins that meet the target on the data they are chosen on, and on the held-out batches.

    A set that only just meets it may miss on other data: then it is chosen again with some slack.
    """
    for slack in _SLACKS:

        def meets(ids: frozenset[str], slack: float = slack) -> bool:
            return _meets(search, ids, search.chosen, slack)

        found = find_pins(ranking, meets, _prices(search))
        if found.outcome == "impossible" or _meets(search, frozenset(found.pins), search.held_out):
            return found
        progress.note(f"{len(found.pins)} pins miss on the held-out batches; choosing with more slack")
    everything = [effect.candidate.id for effect in ranking.effects]
    held = _meets(search, frozenset(everything), search.held_out)
    return PinSearch("found" if held else "impossible", everything, False)


def _meets(search: _Search, ids: frozenset[str], batches: Sequence[int], slack: float = 1.0) -> bool:
    low = frozenset().union(*(c.layers for c in search.candidates if c.id not in ids))
    metrics = search.variants.metrics(low, batches)
    return search.target.met(metrics) and (slack == 1.0 or search.target.damage(metrics) <= 1 / slack)


def _prices(search: _Search) -> dict[str, float]:
    """Weights that each candidate keeps out of the low format: an estimate of its price, in elements."""
    model = search.planned.model
    prices = {}
    for candidate in search.candidates:
        names = {n for layer in candidate.layers for n in model.layer_by_id[layer].inputs}
        elements = sum(model.weights[n].size for n in names if n in model.weights)
        prices[candidate.id] = 1.0 + elements / 1e9
    return prices


def _raised_format(search: _Search, found: PinSearch, progress: Progress) -> tuple[str, Metrics]:
    """The cheapest format for the pins that holds the target on the held-out batches."""
    progress.start("choosing the pins' format", None)
    metrics: Metrics = {}
    for fmt in _RAISED_FORMATS:
        if fmt == search.planned.plan.default:
            continue
        metrics = _plan_metrics(search, _pinned(search, found.pins, fmt))
        if not found.pins or search.target.met(metrics):
            return fmt, metrics
    return "fp32", metrics


def _pinned(search: _Search, pins: Sequence[str], fmt: str) -> Plan:
    names = [pin_for(name, fmt, "measured") for name in pins]
    return search.planned.plan.model_copy(update={"pins": (*search.planned.plan.pins, *names)})


def _plain(search: _Search, fmt: str) -> Plan:
    return Plan.model_validate({"schema": "trtdiag.plan/1", "default": fmt})


def _plan_metrics(search: _Search, plan: Plan) -> Metrics:
    """Outputs of a whole plan, as the typed model has it, on the held-out batches."""
    planned = search.planned.with_plan(plan)
    typed = planned.apply(read_scales(planned, search.table or None))
    return search.variants.plan_metrics(Model("typed", typed.proto, typed.weights, ""), search.held_out)


def _prove(search: _Search, found: PinSearch, ranking: Ranking, fmt: str, progress: Progress) -> Report:
    """Compare the final plan as a user would, and write it down with what each pin was measured to do."""
    settings, out = search.settings, Path(search.settings.out)
    plan = _pinned(search, found.pins, fmt)
    write_plan(plan, out / "plan.yaml")
    compared = CompareSettings(
        model=settings.model,
        data=settings.holdout or settings.data,
        out=settings.out,
        plan=str(out / "plan.yaml"),
        calibration=search.table or None,
        limit=settings.limit,
        fail_under=settings.target,
        save_typed=True,
        command=settings.command,
    )
    return compare(compared, progress, extra_findings=_pin_findings(search, found, ranking, fmt))


def _pin_findings(search: _Search, found: PinSearch, ranking: Ranking, fmt: str) -> list[Finding]:
    effects = {effect.candidate.id: effect for effect in ranking.effects}
    return [_pin_finding(search, effects[pin], ranking.total, fmt) for pin in found.pins]


def _pin_finding(search: _Search, effect: Effect, total: float, fmt: str) -> Finding:
    layer = effect.candidate.id
    role = search.planned.roles[layer]
    reproduced, removed = _share(effect.lowered_mean, total), _share(effect.raised_mean, total)
    place = role.name if role.block is None else f"{role.name} of block {role.block}"
    low = search.planned.resolved.formats[layer]
    return Finding(
        id=f"pin:{layer}",
        kind="sensitive-op",
        severity="warning",
        layers=sorted(effect.candidate.layers, key=lambda n: search.planned.model.layer_by_id[n].index),
        title=f"{place} must stay out of {low.upper()}: {layer}",
        evidence={"lowered_damage": effect.lowered_mean, "raised_gain": effect.raised_mean},
        responsible=max(reproduced, removed) >= 0.5 or None,
        share_removed=removed,
        share_reproduced=reproduced,
        mend=Mend(
            text=f"Kept in {fmt.upper()} by this plan.",
            pins=[PinInfo(target=layer, format=fmt, reason="measured", layers=len(effect.candidate.layers))],
        ),
    )


def _share(part: float, total: float) -> float:
    return part / total if total > 0 and math.isfinite(part) and math.isfinite(total) else 0.0
