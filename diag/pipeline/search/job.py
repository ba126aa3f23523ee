"""`rank` and `pin`: which layers do the damage, and the smallest set that must stay in higher precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from diag.pipeline.engine.builds import Builds
from diag.pipeline.search.choose import both_ends, choose, frontier, judge_start
from diag.pipeline.search.confirm import builds_on, confirm
from diag.pipeline.search.on_builds import OnBuilds
from diag.pipeline.search.order import order_scores
from diag.pipeline.search.outcome import Metrics
from diag.pipeline.search.plans import raised_format, rivals
from diag.pipeline.search.ranking_file import write_ranking
from diag.pipeline.search.report import Found, confirmed
from diag.pipeline.search.settings import RANKING_FILE, SearchSettings
from diag.pipeline.search.setup import Search, set_up
from diag.pipeline.search.spread import spread_over
from diag.pipeline.search.stability import unstable_pins
from diag.progress import Progress
from diag.report.schema import Report
from diag.search.pins import PinSearch
from diag.search.rank import Ranking, rank, ranking_of


def rank_layers(settings: SearchSettings, progress: Progress) -> Ranking:
    """Measure every group of lowered layers alone, both ways, and write ranking.json into `settings.out`."""
    search = set_up(settings, progress)
    with spread_over(settings, search):
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
    unstable: dict[str, str]
    """Pins that other data do not ask for, and why."""
    trials: int
    forward_equivalents: float
    verdict: str
    """One sentence: what to do."""
    met: bool
    """On the batches held out, and on the engine where one was run."""
    proof: str = ""
    on_engine: bool | None = None
    all_batches: bool = False
    """Whether `held_out` and `rivals` are over all batches, since none could be held out."""
    builds: OnBuilds | None = None
    """What builds of the engine said; None where none were run."""


def pin_layers(settings: SearchSettings, progress: Progress, builds: Builds | None = None) -> PinResult:
    """Find, verify on held-out batches and write the smallest set of pins that meets the target.

    Writes ranking.json, plan.yaml, typed.onnx, report.json and report.html into `settings.out`.
    Raises NotEnoughEvidenceError when there are too few batches to hold any out, or to tell whether the
    target is missed at all, and EngineError for an engine that cannot work here. `builds` stands in the place
    of the engine that the settings name.
    """
    builds = builds or builds_on(settings.confirm)
    search = set_up(settings, progress)
    hopeless = search.variants.reference_metrics(range(search.batches))
    if not search.target.met(hopeless):
        return _hopeless(search, hopeless)
    with spread_over(settings, search):
        ranking, pins = _searched(search, progress)
    if pins.used_held_out:  # then all batches judge everything
        search = replace(search, held_out=tuple(range(search.batches)))
    progress.start("choosing the pins' format", None)
    fmt, chosen = raised_format(search, pins.pins)
    points = [*frontier(search, pins, fmt), chosen, *rivals(search)]
    unstable = unstable_pins(search, pins, ranking, progress)
    found = Found(search, pins, ranking, fmt, chosen, points, unstable)
    if pins.outcome == "impossible":
        return _result(found, None)
    return _result(*confirm(found, builds, progress))


def _searched(search: Search, progress: Progress) -> tuple[Ranking, PinSearch]:
    """Both ends first: where one of them is the answer, nothing is ranked."""
    progress.start("measuring with no pins and with all of them", None)
    judge_start(search)
    at_once = both_ends(search)
    if at_once is not None:
        return ranking_of([], [], True), at_once
    ranking = _ranked(search, progress)
    progress.start("choosing pins", None)
    return ranking, choose(search, ranking, progress)


def _hopeless(search: Search, metrics: Metrics) -> PinResult:
    """Not even the reference meets the target: nothing is searched."""
    pins = PinSearch("impossible", [], False)
    verdict = f"{search.target} cannot be met: not even the model in FP32 does"
    return PinResult(pins, ranking_of([], [], False), None, "fp32", metrics, {}, {}, 0, 0.0, verdict, False)


def _result(found: Found, report: Report | None) -> PinResult:
    on_engine = confirmed(report, found) if report is not None else None
    return PinResult(
        found.pins,
        found.ranking,
        report,
        found.format,
        found.chosen.metrics,
        {point.plan.default: point.metrics for point in found.points if point.kind == "rival"},
        found.unstable,
        found.search.variants.trials,
        found.search.variants.forward_equivalents,
        found.verdict,
        found.met and on_engine is not False,
        found.proof,
        on_engine,
        found.search.all_judge,
        found.builds,
    )


def _ranked(search: Search, progress: Progress) -> Ranking:
    """The ranking that was handed in where it holds, measured where it does not; written down."""
    target = str(search.target)
    known = search.ranked.effects(target) if search.ranked else {}
    if search.ranked and len(known) == len(search.candidates):
        totals = [math.inf if t is None else t for t in search.ranked.totals]
        ranking = ranking_of([known[c.id] for c in search.candidates], totals, True)
    else:
        ranking = rank(
            search.candidates,
            lambda low, batch: search.variants.damage(search.target, low, batch),
            search.chosen,
            progress,
            search.settings.budget_s / 2,  # the other half is for choosing
            lambda sets, batch: search.variants.ahead((low, batch) for low in sets),
            order_scores(search, progress),
        )
    path = Path(search.settings.out) / RANKING_FILE
    write_ranking(path, search.key, target, ranking, search.planned.model, search.planned.roles)
    return ranking
