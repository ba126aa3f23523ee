"""The steps of compensation in turn; each group's change is kept only if held-out outputs improve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diag.calibration.table import Credit
from diag.compensation.draft import Draft
from diag.compensation.proposals import (
    Proposal,
    Workplace,
    corrections,
    propose_corrections,
    propose_ranges,
    propose_smoothing,
    propose_splits,
    propose_weight_steps,
)
from diag.compensation.trial import Bench, Difference, Outcome
from diag.progress import Progress

Propose = Callable[[Workplace, Draft], list[Proposal]]

STEPS: Mapping[str, Propose] = {
    "bias": propose_corrections,
    "smooth": lambda place, draft: propose_smoothing(place, draft, folds=True),
    "insert": lambda place, draft: propose_smoothing(place, draft, folds=False),
    "split": propose_splits,
    "scale": propose_ranges,
    "weights": propose_weight_steps,
}
"""Bias correction first: smoothing leaves nearly constant errors in small channels, and is judged without."""

ADD_NODES = frozenset({"insert", "split"})
"""Steps that cost an engine time."""

STEPS_IN_WORDS = {
    "bias": "mean error of each channel taken off",
    "smooth": "scale moved into the constants in front (SmoothQuant)",
    "insert": "scale moved into a Mul that is inserted",
    "split": "outlier channels in two halves",
    "scale": "ranges of activations by output error",
    "weights": "steps of weights by output error",
}


@dataclass
class Compensated:
    """The draft that came out, and how."""

    draft: Draft
    before: Outcome
    after: Outcome
    difference: Difference
    """Of the FP32 outputs from the original's."""
    credits: list[Credit] = field(default_factory=list)
    stages: dict[str, Compensated] = field(default_factory=dict)
    """What there was after each step that was tried."""


def compensate(
    place: Workplace, bench: Bench, draft: Draft, steps: Sequence[str], progress: Progress
) -> Compensated:
    """Try the steps in their order, group by group. `draft`: the original model and its measured ranges."""
    progress.start("judging the quantized model", None)
    before = bench.judge(draft)
    found = Compensated(draft, before, before, Difference(0.0, 0.0))
    for step, propose in STEPS.items():
        if step in steps:
            progress.start(f"compensation: {STEPS_IN_WORDS[step]}", None)
            proposals = propose(place, found.draft)
            progress.start(f"compensation: {STEPS_IN_WORDS[step]}", len(proposals))
            for proposal in proposals:
                _consider(place, bench, found, step, proposal, "bias" in steps)
                progress.advance()
            found.stages[step] = replace(found, credits=list(found.credits), stages={})
    return found


def _consider(
    place: Workplace, bench: Bench, found: Compensated, step: str, proposal: Proposal, corrects: bool
) -> None:
    """Keep a proposal if the FP32 outputs stay what they are and the quantized ones improve."""
    candidate = proposal.apply(found.draft)
    difference = found.difference
    if candidate.model is not found.draft.model:
        difference = bench.difference(candidate.model)
        if not bench.same(difference):
            reason = f"not the same in FP32 (relative L2 {difference.rel_l2:.1e})"
            found.credits.append(_credit(step, proposal, found.after, found.after, reason))
            return
    if step != "bias":
        candidate = _corrected_anew(place, candidate, frozenset(proposal.layers), corrects)
    outcome = bench.judge(candidate, found.after)
    reason = _reason(place, step, outcome, found.after)
    found.credits.append(_credit(step, proposal, found.after, outcome, reason))
    if not reason:
        found.draft, found.after, found.difference = candidate, outcome, difference


def _corrected_anew(place: Workplace, draft: Draft, layers: frozenset[str], corrects: bool) -> Draft:
    """Corrections belong to the operands as they are rounded: changed operands need new ones."""
    kept = {name: value for name, value in draft.corrections.items() if name not in layers}
    fresh = corrections(place, draft, layers) if corrects else {}
    return replace(draft, corrections={**kept, **fresh})


def _reason(place: Workplace, step: str, outcome: Outcome, before: Outcome) -> str:
    """Why an outcome is not good enough; empty when it is."""
    gain, rules = outcome.gain_db(before), place.rules
    least = rules.least_output_gain_db_of_nodes if step in ADD_NODES else rules.least_output_gain_db
    if gain < least:
        return f"the outputs change by {gain:+.2f} dB"
    if outcome.share_better(before) < rules.least_batches_better:
        return f"only {outcome.share_better(before):.0%} of the batches improve"
    return ""


def _credit(step: str, proposal: Proposal, before: Outcome, after: Outcome, reason: str) -> Credit:
    return Credit(
        step=step,
        group=proposal.group,
        layers=dict(proposal.layers),
        before=before.damage,
        after=min(after.damage, 1e30),
        kept=not reason,
        reason=reason,
    )
