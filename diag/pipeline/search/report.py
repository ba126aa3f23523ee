"""What `pin` found, as a report: the final plan compared, each pin explained, rivals beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diag.gate.threshold import Threshold
from diag.numerics.table import METRICS
from diag.pipeline.compare.job import compare
from diag.pipeline.search.explain import pin_findings, pin_of
from diag.pipeline.search.on_builds import OnBuilds
from diag.pipeline.search.outcome import OWN
from diag.pipeline.search.plans import RIVALS, Weighed
from diag.pipeline.search.setup import Search
from diag.pipeline.settings import CompareSettings, EngineSettings
from diag.plan.schema import Plan, write_plan
from diag.progress import Progress
from diag.render.cells import count
from diag.report.schema import (
    Check,
    GateResult,
    Report,
    SearchInfo,
    SearchPoint,
)
from diag.search.frontier import dominated
from diag.search.pins import PinSearch
from diag.search.rank import Ranking
from diag.search.target import answer

_NOT_BUILT = ("precision-not-built", "pin-not-honoured")
"""Kinds of findings that say that an engine is not what the plan asks for."""


@dataclass(frozen=True)
class Found:
    """A finished search, before it is written down."""

    search: Search
    pins: PinSearch
    ranking: Ranking
    format: str
    chosen: Weighed
    points: list[Weighed]
    unstable: dict[str, str]
    builds: OnBuilds | None = None
    """What builds of an engine said of the pins; None where none were run."""

    @property
    def met(self) -> bool:
        """On the batches held out; pins found on builds are judged there, on all batches."""
        if self.builds is not None and self.builds.repaired:
            return True
        return self.pins.outcome in ("found", "not-needed") and self.search.target.met(self.chosen.metrics)

    @cached_property
    def winner(self) -> Weighed | None:
        """A plain plan that meets the target, with no more error than the pins and no more time."""
        damage = self.search.target.damage
        here = (damage(self.chosen.metrics), self.chosen.price)
        plain = [p for p in self.points if p.kind == "rival" and self.search.target.met(p.metrics)]
        better = [p for p in plain if dominated(*here, [(damage(p.metrics), p.price)])]
        return min(better, key=lambda p: p.price, default=None)

    @property
    def verdict(self) -> str:
        """One sentence: what to do."""
        target = self.search.target
        if self.pins.outcome == "not-needed":
            said = f"{target} holds without any pin"
        elif self.pins.outcome == "ceiling":
            said = (
                f"{target} cannot be met under the ceiling; the best that was found is shown, {self._counted}"
            )
        elif not self.met:
            said = f"{target} cannot be met, even with every candidate raised{self._held_back()}"
            evidence = self.chosen.evidence
            if evidence is not None and not evidence.decides:
                said += f"; these batches are too few to be sure, about {evidence.needed} would be enough"
        else:
            said = f"{target} holds with {self._counted} in {self.format.upper()}"
        if self.builds is not None and self.met:
            said += self.builds.remark
        if self.winner is None:
            return said
        times = "by measured time" if self.search.prices.measured else "by the estimate"
        return f"{said}, but {self.winner.label} is better and no slower ({times}): take that plan"

    @property
    def _counted(self) -> str:
        """The pins, with the layers that they move where those are more."""
        known = {candidate.id: candidate.layers for candidate in self.search.candidates}
        layers = sum(len(known.get(pin, (pin,))) for pin in self.pins.pins)
        pins = count(len(self.pins.pins), "pin")
        return pins if layers == len(self.pins.pins) else f"{pins} ({layers} layers)"

    def _held_back(self) -> str:
        """What outside the candidates may hold a target back."""
        formats = self.search.planned.resolved.formats
        inside = self.search.low()
        outside = [n for n, fmt in formats.items() if fmt != "fp32" and n not in inside]
        if not outside:
            return ""
        are = "is no candidate" if len(outside) == 1 else "are no candidates, the first"
        return (
            f"; {count(len(outside), 'lowered layer')} {are}{':' if len(outside) == 1 else ''} {outside[0]}"
        )

    @property
    def proof(self) -> str:
        """How far the set is proven."""
        if self.builds is None:
            return self._emulated_proof
        return self.builds.proof if self.builds.repaired else f"{self._emulated_proof} {self.builds.proof}"

    @property
    def _emulated_proof(self) -> str:
        if self.pins.outcome == "not-needed":
            return "No pin is needed on the batches held out."
        minimal = "Taking any pin away misses the target" if self.pins.minimal else "Not proven minimal"
        if self.pins.minimal and self.pins.idle:
            minimal = f"Without the idle ones ({len(self.pins.idle)}), taking any pin away misses the target"
        data = (
            "all batches, those held out too" if self.pins.used_held_out else "the batches it was chosen on"
        )
        sure = " One batch is held out: no interval can be given."
        if self.chosen.evidence is not None:
            e, where = self.chosen.evidence, "over them" if self.pins.used_held_out else "held out"
            sure = (
                f" Damage {where}: {e.mean:.2g} of what the target allows (95 % interval {e.low:.2g} to "
                f"{e.high:.2g}, {e.batches} batches)."
            )
            if not e.decides:
                sure += f" That interval holds 1: about {e.needed} batches would decide."
        return f"{minimal}, measured on {data}.{sure}{self._still_destroyed}"

    @property
    def _still_destroyed(self) -> str:
        """Layers that lose values and are no pins; known where candidates were screened."""
        scores = self.search.scores
        if scores is None or not self.met:
            return ""
        left = [i for i, noise in scores.local.items() if math.isinf(noise) and i not in self.pins.pins]
        if not left:
            return ""
        norms = sum(self.search.planned.roles[i].name == "norm" for i in left)
        return (
            " Left lowered although values are lost in them on some batch, since the target does not ask for "
            f"them: {len(left)} (norms among them: {norms}), the first {left[0]}."
        )


def prove(found: Found, progress: Progress, engine: str) -> Report:
    """Compare the final plan as a user would, and write it down with what each pin was measured to do.

    `engine` is as in `EngineSettings`.
    """
    search, settings = found.search, found.search.settings
    out = Path(settings.out)
    write_plan(found.chosen.plan, out / "plan.yaml")
    compared = CompareSettings(
        model=settings.model,
        data=settings.holdout or settings.data,
        out=settings.out,
        plan=str(out / "plan.yaml"),
        calibration=search.table or None,
        limit=settings.limit,
        fail_under=tuple(t for t in settings.target if t.metric in METRICS),
        save_typed=True,
        labelled=settings.metric is not None,
        engine=EngineSettings(engine=engine),
        command=settings.command,
    )
    return compare(compared, progress, amend=lambda report: _amend(report, found))


def confirmed(report: Report, found: Found) -> bool | None:
    """Whether the engine was built as the plan asks and, where it was run, holds the target too.

    None where no engine was asked for. TensorRT-RTX without its GPU is audited, not run.
    """
    if found.search.settings.confirm is None:
        return None
    if any(finding.kind in _NOT_BUILT and finding.severity != "note" for finding in report.findings):
        return False
    ran = {output.name: output.engine for output in report.outputs if output.engine}
    if found.builds is not None:  # it has the user's own metric too
        return found.builds.met and found.search.target.met({**found.builds.metrics, **ran})
    return found.search.target.met(ran) if ran else True


def _amend(report: Report, found: Found) -> None:
    pins = pin_findings(found.search, found.pins, found.ranking, found.format, found.unstable)
    if found.builds is not None and found.builds.repaired:
        for finding in pins:
            finding.evidence["on_builds"] = found.builds.without(pin_of(finding))
    report.findings = [*pins, *report.findings]
    report.search = _info(found)
    report.verdict = f"{found.verdict}. {report.verdict}"
    own = found.chosen.metrics.get(OWN)
    if own is not None:
        asked = [t for t in found.search.settings.target if t.metric not in METRICS]
        checks = [_own_check(t, own) for t in asked]
        before = report.gate.checks if report.gate else []
        passed = all(c.passed for c in (*before, *checks))
        report.gate = GateResult(passed=passed, checks=[*before, *checks])


def _own_check(threshold: Threshold, own: dict[str, float]) -> Check:
    value = own[threshold.metric]
    return Check(name=str(threshold), value=value, bound=threshold.bound, passed=threshold.holds(value))


def _info(found: Found) -> SearchInfo:
    search = found.search
    first = search.settings.target[0]
    start = search.prices.plan(search.planned.resolved.formats)
    better = METRICS[first.metric].better if first.metric in METRICS else ""
    return SearchInfo(
        target=str(search.target),
        metric=first.metric,
        bound=first.bound,
        higher_is_better=better == "higher" or (not better and first.op.startswith(">")),
        measured_prices=search.prices.measured,
        prices=search.prices.source,
        points=[_point(found, p, first, start) for p in found.points],
        proof=found.proof,
        notes=[
            *(f"{pin} is unstable: it appears or vanishes {why}." for pin, why in found.unstable.items()),
            *_before_pins(found),
            *(found.builds.notes if found.builds else []),
        ],
    )


def _before_pins(found: Found) -> list[str]:
    """What compensation brought, and the pins that it made unnecessary."""
    before = found.search.settings.before
    if before is None:
        return []
    if before.plain_pins is None:
        return [*before.credits, "Without compensation no set of pins met the target."]
    gone = [pin for pin in before.plain_pins if pin not in found.pins.pins]
    named = f": {', '.join(gone)}" if gone else ""
    needed = f"Pins needed without compensation: {len(before.plain_pins)}"
    return [*before.credits, f"{needed}. Unnecessary now: {len(gone)}{named}."]


def _label(weighed: Weighed, begun: Plan) -> str:
    """What a plan is called; what began as one plain format is a rival too."""
    if weighed.pins or weighed.kind == "rival":
        return weighed.label
    plain = begun.default in RIVALS and not begun.pins
    return f"everything in {begun.default.upper()} (no pins)" if plain else "no pins"


def _point(found: Found, weighed: Weighed, first: Threshold, start: float) -> SearchPoint:
    return SearchPoint(
        label=_label(weighed, found.search.planned.plan),
        kind=weighed.kind,
        pins=weighed.pins,
        value=answer(first, weighed.metrics),
        price=weighed.price / start if start > 0 else 1.0,
        met=found.search.target.met(weighed.metrics),
    )
