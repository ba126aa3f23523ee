"""Each pin as a finding: what it is and costs, what it buys alone and in the set, and why it is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diag.pipeline.search.drawn import spare_layers
from diag.pipeline.search.setup import Search
from diag.pipeline.search.why import reasons
from diag.report.schema import Finding, Mend, Report
from diag.search.pins import PinSearch
from diag.search.rank import Candidate, Effect, Ranking
from diag.search.reasons import NONE_FOUND, NOT_JUDGED, Reason, pin_rules
from diag.search.target import Bound, answer

_ID = "pin:"

_RESPONSIBLE = 0.5
"""Share of the damage that a layer makes or removes alone, from which it is called responsible."""

_TOGETHER = {
    "norm": "the {} layers of a norm move together: TensorRT fuses them into one kernel of one type",
    "shared_input": "{} layers move together: one quantizer feeds them, and TensorRT merges them",
}
"""Why a pin moves more than one layer, by the kind of its group."""


@dataclass(frozen=True)
class InSet:
    """The target's metric with all pins, and with all but one; pins in FP32."""

    bound: Bound
    with_it: float
    without: float
    batches: int
    of: int

    def __str__(self) -> str:
        part = "" if self.batches == self.of else f"; on {self.batches} of {self.of} batches, the hardest"
        values = f"without it {self.bound.metric} {_number(self.without)}, with it {_number(self.with_it)}"
        return f"{values} (target {self.bound}; pins in FP32{part})"


def pin_findings(
    search: Search, found: PinSearch, ranking: Ranking, fmt: str, unstable: Mapping[str, str]
) -> list[Finding]:
    """One finding for each pin of `found`, kept in `fmt`, in its order."""
    known = {candidate.id: candidate for candidate in search.candidates}
    pins = [known[pin] for pin in found.pins if pin in known]
    effects = {effect.candidate.id: effect for effect in ranking.effects if effect.lowered}
    why, sets = reasons(search, pins), _in_set(search, found)
    explained = []
    for pin in pins:
        effect = effects.get(pin.id)
        finding = _finding(search, pin, why, fmt)
        finding.evidence = {
            **_alone(effect),
            "in_the_set": str(sets.get(pin.id, "not tried without it")),
            **finding.evidence,
            **_together(search, found, pin),
            **_remarks(pin, found, unstable),
        }
        if effect is not None:
            removed, reproduced = (
                _share(d, ranking.total) for d in (effect.raised_mean, effect.lowered_mean)
            )
            finding.share_removed, finding.share_reproduced = removed, reproduced
            finding.responsible = max(removed, reproduced) >= _RESPONSIBLE or None
        explained.append(finding)
    return explained


def pin_of(finding: Finding) -> str:
    """The candidate that a finding about a pin is about."""
    return finding.id.removeprefix(_ID)


def pins_of(report: Report) -> list[Finding]:
    """The findings of a report that are about pins."""
    return [finding for finding in report.findings if finding.id.startswith(_ID)]


def _finding(search: Search, pin: Candidate, why: Mapping[str, Reason | None], fmt: str) -> Finding:
    """What does not depend on the set that the pin is in."""
    planned = search.planned
    role, reason = planned.roles[pin.id], why.get(pin.id)
    low = planned.resolved.formats[pin.id].upper()
    none_found = NONE_FOUND if pin.id in why else NOT_JUDGED.format(low)
    place = role.name if role.block is None else f"{role.name} of block {role.block}"
    return Finding(
        id=f"{_ID}{pin.id}",
        kind=reason.kind if reason is not None else "sensitive-op",
        severity="warning",
        layers=_in_order(search, pin),
        title=f"{place} must stay out of {low}: {pin.id}",
        evidence={
            "why": reason.text if reason is not None else none_found,
            "price": _price(search, pin, fmt),
        },
        mend=Mend(text=f"Kept in {fmt.upper()} by this plan."),
    )


def _in_order(search: Search, pin: Candidate) -> list[str]:
    return sorted(pin.layers, key=lambda name: search.planned.model.layer_by_id[name].index)


def _alone(effect: Effect | None) -> dict[str, float]:
    """Damages in units of what the target allows; nothing where it was not ranked."""
    if effect is None:
        return {}
    return {"lowered_damage": effect.lowered_mean, "raised_gain": effect.raised_mean}


def _together(search: Search, found: PinSearch, pin: Candidate) -> dict[str, float | str | bool]:
    """Why a pin moves more than one layer, and whether it must."""
    number = len(pin.layers)
    if number == 1 or pin.kind not in (*_TOGETHER, "drawn"):
        return {}
    if pin.kind != "drawn":
        return {"together": _TOGETHER[pin.kind].format(number)}
    spare = spare_layers(search, found.pins, pin, _chose(search, found), pin_rules().in_set_trials)
    said = f"{number} layers were drawn as one group in the ranking"
    if spare is None:
        return {"together": f"{said}; whether fewer would do was not tried"}
    if not spare:
        return {"together": f"{said}; the target needs each of them"}
    return {"together": f"{said}; the target holds without {', '.join(spare)}: take them out of the group"}


def _remarks(pin: Candidate, found: PinSearch, unstable: Mapping[str, str]) -> dict[str, float | str | bool]:
    said: dict[str, float | str | bool] = {}
    if pin.id in found.idle:
        said["idle"] = "the target holds without it; lowered it buys no time"
    if pin.id in unstable:
        said["unstable"] = unstable[pin.id]
    return said


def _chose(search: Search, found: PinSearch) -> tuple[int, ...]:
    """The batches that chose these pins."""
    return tuple(sorted({*search.chosen, *search.held_out})) if found.used_held_out else search.chosen


def _in_set(search: Search, found: PinSearch) -> dict[str, InSet]:
    """What each pin buys in the set, on the batches that chose.

    The proof that the set is minimal made most of these trials. Of the others a few are measured; a pin whose
    trials would be too many is judged on the batches that there are, the hardest, or left out.
    """
    batches = _chose(search, found)
    left, sets = pin_rules().in_set_trials, {}
    for pin in found.pins if found.pins and found.outcome != "impossible" else ():
        low = search.low(set(found.pins) - {pin})
        known = [b for b in batches if search.variants.knows(low, b)]
        if len(batches) - len(known) <= left:
            left -= len(batches) - len(known)
            known = list(batches)
        if known:
            sets[pin] = _measured(search, low, search.low(found.pins), known, len(batches))
    return sets


def _measured(
    search: Search, without: frozenset[str], low: frozenset[str], batches: Sequence[int], of: int
) -> InSet:
    missed = search.variants.metrics(without, batches)
    bound = search.target.worst_bound(missed)
    held = search.variants.metrics(low, batches)
    return InSet(bound, answer(bound, held), answer(bound, missed), len(batches), of)


def _price(search: Search, pin: Candidate, fmt: str) -> str:
    formats = search.planned.resolved.formats
    added = search.prices.raising(_in_order(search, pin), formats, fmt)
    if search.prices.measured:
        return f"{added:+.3g} ms"
    start = search.prices.plan(formats)
    return f"{added / start if start > 0 else 0.0:+.2%} of the plan's time, estimated"


def _share(part: float, total: float) -> float:
    return part / total if total > 0 and math.isfinite(part) and math.isfinite(total) else 0.0


def _number(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not finite"
