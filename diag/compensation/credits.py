"""What compensation brought, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diag.calibration.table import Credit
from diag.compensation.run import STEPS, STEPS_IN_WORDS


def credit_lines(found: Sequence[Credit]) -> list[str]:
    """A line for each step with its total, and one for each of its groups, which begins with two spaces."""
    lines = []
    for step in STEPS:
        of_step = [credit for credit in found if credit.step == step]
        if of_step:
            total = sum(gain_of(credit) for credit in of_step if credit.kept)
            lines.append(f"{step} ({STEPS_IN_WORDS[step]}): {total:+.2f} dB")
            lines += [f"  {_line(credit)}" for credit in of_step]
    return lines


def credit_sentences(found: Sequence[Credit]) -> list[str]:
    """One sentence for each step that was tried: what it brought, and for which layers."""
    sentences = []
    for step in STEPS:
        of_step = [credit for credit in found if credit.step == step]
        kept = [credit for credit in of_step if credit.kept]
        if of_step:
            total = sum(gain_of(credit) for credit in kept)
            layers = ", ".join(f"{credit.group} ({len(credit.layers)})" for credit in kept)
            said = f"brought {total:+.2f} dB to the layers of {layers}" if kept else "brought nothing"
            sentences.append(f"Compensation, {STEPS_IN_WORDS[step]}: {said}.")
    return sentences


def gain_of(credit: Credit) -> float:
    """By how many dB the damage of the model's outputs fell."""
    if credit.before <= 0 or credit.after <= 0:
        return 0.0
    return 10 * math.log10(credit.before / credit.after)


def _line(credit: Credit) -> str:
    count = len(credit.layers)
    layers = f"{count} layer{'' if count == 1 else 's'} of {credit.group}"
    own = sum(credit.layers.values()) / max(count, 1)
    if credit.kept:
        return (
            f"kept for {layers}: outputs {gain_of(credit):+.2f} dB, the layers' own {own:+.2f} dB on average"
        )
    return f"not for {layers} (their own outputs {own:+.2f} dB): {credit.reason}"
