"""Sums as they are written into a table, and back, without loss.

Counts are decimal integers with spaces between them, without the zeros at the end; exact fractions are
written `numerator/denominator`; channels are float32 numbers in the fewest digits that read back the same.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from diag.calibration.sums import VARIES, Channels, HalfSums, TensorSums
from diag.calibration.table import Evidence, TensorRange, vector_of
from diag.errors import TableError
from diag.numerics.histogram import BINS, Histogram, bin_exponent

_VARIES = "varies"


def evidence_of(sums: TensorSums) -> Evidence:
    """The exact sums of a tensor, its extremes and channels left to the table's own fields."""
    first, second = sums.halves
    return Evidence(
        exponents=(first.histogram.exponent, second.histogram.exponent),
        counts=(_text(first.histogram.counts), _text(second.histogram.counts)),
        half_absmax=(first.absmax, second.absmax),
        total=str(sums.total),
        energy=str(sums.energy),
    )


def _text(counts: NDArray[np.int64]) -> str:
    filled = np.flatnonzero(counts)
    return " ".join(map(str, counts[: int(filled[-1]) + 1].tolist())) if filled.size else ""


def channels_text(channels: Channels | None) -> str | None:
    """Channels as text; None when there are none, `varies` when their number depends on the data."""
    if channels is None:
        return None
    return " ".join(map(_shortest, channels)) if channels.size else _VARIES


def _shortest(value: np.float32) -> str:
    text = str(value)
    return text if np.float32(float(text)) == value else repr(float(value))


def sums_of(name: str, found: TensorRange) -> TensorSums:
    """The sums that a table holds of a tensor.

    Raises TableError when it holds none (only ranges were measured) or they contradict each other.
    """
    if found.evidence is None:
        raise TableError(
            f"the calibration table holds no histogram of tensor {name!r}",
            "Only tables of trtdiag calibrate can be merged; calibrate again.",
        )
    try:
        return _sums(found, found.evidence)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise TableError(
            f"the calibration table's sums of tensor {name!r} are damaged: {error}", "Calibrate again."
        ) from error


def _sums(found: TensorRange, evidence: Evidence) -> TensorSums:
    halves = [
        HalfSums(_histogram(text, exponent, absmax), absmax)
        for text, exponent, absmax in zip(
            evidence.counts, evidence.exponents, evidence.half_absmax, strict=True
        )
    ]
    if sum(half.histogram.elements for half in halves) != found.elements:
        raise ValueError(f"{found.elements} elements, but other counts")
    if found.absmax != max(half.absmax for half in halves):
        raise ValueError("no half holds the largest magnitude")
    return TensorSums(
        halves=(halves[0], halves[1]),
        minimum=found.minimum if found.elements else math.inf,
        maximum=found.maximum if found.elements else -math.inf,
        nonfinite=found.nonfinite,
        total=Fraction(evidence.total),
        energy=Fraction(evidence.energy),
        channels=channels_of(found.channel_absmax),
    )


def _histogram(text: str, exponent: int | None, absmax: float) -> Histogram:
    given = [int(word) for word in text.split()]
    if exponent != bin_exponent(absmax) or len(given) > BINS + 1 or any(number < 0 for number in given):
        raise ValueError("no histogram of such values")
    counts = np.zeros(BINS + 1, np.int64)
    counts[: len(given)] = given
    return Histogram(exponent, counts)


def channels_of(text: str | None) -> Channels | None:
    """Channels from their text; empty when their number varies."""
    if text is None or text == _VARIES:
        return None if text is None else VARIES
    return vector_of(text)
