"""Why a layer had to be pinned: the hazard in what it reads, from measurements; or that there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from diag.numerics.steps import StepSums
from diag.resources import Rules, read_rules

Part = Literal["input", "probabilities", "weight"]

NONE_FOUND = "nothing in what it reads explains it: the outputs depend more on it than on other layers"
"""Said where no hazard was found."""

NOT_JUDGED = "what it reads was not judged: {} has a scale for each block"
"""Said of formats in blocks, whose scales are no single step."""


class PinRules(Rules):
    """Contents of rules/pins.yaml; what each number means stands there."""

    outlier_channel: float
    outlier_zeroed_share: float
    probabilities_zeroed_share: float
    probabilities_sqnr_db: float
    clipped_energy_ratio: float
    operand_sqnr_db: float
    in_set_trials: int


@cache
def pin_rules() -> PinRules:
    """The rules that ship with this release."""
    return read_rules("pins.yaml", PinRules)


@dataclass(frozen=True, slots=True)
class Reason:
    """A hazard, as a clause about the pinned layer."""

    kind: str
    """A name of rules/finding_kinds.yaml."""
    text: str


@dataclass(frozen=True, slots=True)
class QuantizedOperand:
    """What one operand of a layer loses in its quantized format."""

    tensor: str
    part: Part
    sqnr_db: float
    clipped_energy_ratio: float = 0.0
    zeroed_share: float = 0.0
    channel: int = -1
    channel_ratio: float = 1.0
    """Largest magnitude in `channel` over that of the median channel."""
    absmax: float = 0.0
    range: float = math.inf
    """Magnitudes beyond it are clipped."""

    @classmethod
    def of(cls, tensor: str, part: Part, sums: StepSums) -> QuantizedOperand:
        """An activation, measured."""
        channel, ratio = sums.outlier
        return cls(
            tensor,
            part,
            sums.sqnr_db,
            sums.clipped_energy_ratio,
            sums.zeroed_share,
            channel,
            ratio,
            sums.absmax,
            sums.range,
        )


def quantized_reason(operands: Sequence[QuantizedOperand]) -> Reason | None:
    """The hazard of the operand that loses most, of those that have one; None where none has."""
    for operand in sorted(operands, key=lambda o: o.sqnr_db):
        found = _hazard(operand, pin_rules())
        if found is not None:
            return found
    return None


def _hazard(operand: QuantizedOperand, rules: PinRules) -> Reason | None:
    if operand.part == "weight":
        text = f"its weight has too coarse steps by output channel ({operand.sqnr_db:.1f} dB)"
        return Reason("shared-range", text) if operand.sqnr_db < rules.operand_sqnr_db else None
    if operand.clipped_energy_ratio >= rules.clipped_energy_ratio:
        return Reason(
            "calibration-method",
            f"its range cuts off {_percent(operand.clipped_energy_ratio)} of the energy of its input "
            f"{operand.tensor} (range {operand.range:.4g}, largest value {operand.absmax:.4g})",
        )
    if operand.part == "probabilities":
        lost = operand.zeroed_share >= rules.probabilities_zeroed_share
        lost = lost and operand.sqnr_db < rules.probabilities_sqnr_db
        text = (
            f"{_percent(operand.zeroed_share)} of its softmax probabilities that are not 0 are below half a "
            f"step and become 0 ({operand.sqnr_db:.1f} dB are left)"
        )
        return Reason("shared-range", text) if lost else None
    return _coarse(operand, rules)


def _coarse(operand: QuantizedOperand, rules: PinRules) -> Reason | None:
    """Steps that a few large values make too wide for the others."""
    zeroed = f"{_percent(operand.zeroed_share)} of the values that are not 0 become 0"
    wide = operand.channel >= 0 and operand.channel_ratio >= rules.outlier_channel
    if wide and operand.zeroed_share >= rules.outlier_zeroed_share:
        times = f"{operand.channel_ratio:.3g} times" if math.isfinite(operand.channel_ratio) else "far beyond"
        return Reason(
            "shared-range",
            f"channel {operand.channel} of its input {operand.tensor} reaches {times} the median channel, "
            f"and one step serves all: {zeroed}",
        )
    if operand.sqnr_db < rules.operand_sqnr_db:
        return Reason(
            "shared-range",
            f"a few large values of its input {operand.tensor} leave the others too few steps: "
            f"{operand.sqnr_db:.1f} dB are left, {zeroed}",
        )
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.3g} %"
