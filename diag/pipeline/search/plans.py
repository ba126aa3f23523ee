"""Plans that a search weighs: with pins in some format, or one plain format throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diag.pipeline.prepare import read_scales
from diag.pipeline.search.outcome import Metrics
from diag.pipeline.search.setup import Search
from diag.plan.schema import Plan, pin_for, plan_for_format
from diag.search.evidence import Evidence, evidence
from diag.search.rank import Candidate

RAISED_FORMATS = ("fp16", "bf16", "fp32")
"""In the order of their price; the first that holds the target is taken."""

RIVALS = ("fp16", "bf16")


Kind = Literal["start", "candidate", "chosen", "rival"]


@dataclass(frozen=True)
class Weighed:
    """A whole plan, measured on the held-out batches and priced."""

    label: str
    kind: Kind
    """`start` (no pins), `candidate`, `chosen` or `rival`."""
    pins: int
    metrics: Metrics
    price: float
    """Time, in the unit of the prices."""
    plan: Plan
    distances: tuple[float, ...] = ()
    """Of each held-out batch: 1 where the target begins to hold. Empty where only the whole was measured."""

    @property
    def evidence(self) -> Evidence | None:
        """How sure the batches held out are of this plan; None when there is but one."""
        return evidence(self.distances) if len(self.distances) > 1 else None


def pinned(search: Search, pins: Sequence[str], fmt: str) -> Plan:
    """The user's plan with every layer of these candidates pinned to `fmt`."""
    known = {c.id: c for c in search.candidates}
    names = [pin_for(name, fmt, "measured") for pin in pins for name in _names(known[pin])]
    return search.planned.plan.model_copy(update={"pins": (*search.planned.plan.pins, *names)})


def _names(candidate: Candidate) -> list[str]:
    """What to pin: a group that the plan knows moves with its first layer, a drawn one does not."""
    known = candidate.kind in ("norm", "shared_input")
    return [candidate.id] if known else sorted(candidate.layers)


def weigh(search: Search, plan: Plan, label: str, kind: Kind, pins: int = 0) -> Weighed:
    """Outputs of a whole plan, as the typed model has it, on the held-out batches; and its price."""
    planned = search.planned.with_plan(plan)
    typed = planned.apply(read_scales(planned, search.table or None))
    outcomes = search.variants.plan_outcomes(typed.model, search.held_out)
    distances = tuple(search.target.distance(search.variants.total([o])) for o in outcomes)
    metrics = search.variants.total(outcomes)
    return Weighed(label, kind, pins, metrics, search.prices.plan(typed.formats), plan, distances)


def rivals(search: Search) -> list[Weighed]:
    """Everything in FP16 and everything in BF16; one that is what the search began with is left out."""
    begun = search.planned.plan
    plain = [fmt for fmt in RIVALS if begun.default != fmt or begun.pins]
    return [weigh(search, plan_for_format(fmt), f"everything in {fmt.upper()}", "rival") for fmt in plain]


def raised_format(search: Search, pins: Sequence[str]) -> tuple[str, Weighed]:
    """The cheapest format for the pins that holds the target on the held-out batches; else FP32."""
    found: tuple[str, Weighed] | None = None
    for fmt in RAISED_FORMATS:
        if fmt == search.planned.plan.default:
            continue
        label = f"{len(pins)} pins in {fmt.upper()}" if len(pins) != 1 else f"1 pin in {fmt.upper()}"
        found = fmt, weigh(search, pinned(search, pins, fmt), label, "chosen", len(pins))
        if not pins or search.target.met(found[1].metrics):
            return found
    assert found is not None
    return found
