"""What is counted of a tensor: facts that add up exactly, in any order.

Counts are integers, extremes are exact. Sums of values and of squares are taken over each batch in float64,
in a fixed order; from then on they are rational numbers (float64 values are), so adding them loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.calibration.samples import Split
from diag.numerics.histogram import Histogram, count

Array = NDArray[Any]
Channels = NDArray[np.float32]

MOST_CHANNELS = 1 << 14
"""Tensors with more channels than this have none recorded."""

_FEW_CHANNELS = 16
"""Below this the columns of a matrix are reduced faster after transposing."""

VARIES: Channels = np.zeros(0, np.float32)
"""Stands for the channels of a tensor whose number of channels depends on the data."""


@dataclass(slots=True)
class HalfSums:
    """One half of the data."""

    histogram: Histogram = field(default_factory=Histogram)
    absmax: float = 0.0

    def add(self, other: HalfSums) -> None:
        self.histogram.add(other.histogram)
        self.absmax = max(self.absmax, other.absmax)


@dataclass(slots=True)
class TensorSums:
    """One tensor over all data so far. `minimum` and `maximum` are infinities while it is empty."""

    halves: tuple[HalfSums, HalfSums] = field(default_factory=lambda: (HalfSums(), HalfSums()))
    minimum: float = math.inf
    maximum: float = -math.inf
    nonfinite: int = 0
    """Elements that are NaN or infinite; the batches that hold them enter nothing else."""
    total: Fraction = Fraction()
    """Sum of all elements."""
    energy: Fraction = Fraction()
    """Sum of all squares."""
    channels: Channels | None = None
    """Largest magnitude in each channel; None before there were any, `VARIES` when their number varies."""

    def add(self, other: TensorSums) -> None:
        """Take in the sums of other data of the same tensor."""
        for mine, theirs in zip(self.halves, other.halves, strict=True):
            mine.add(theirs)
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.nonfinite += other.nonfinite
        self.total += other.total
        self.energy += other.energy
        self.channels = _joined(self.channels, other.channels)

    @property
    def absmax(self) -> float:
        return max(half.absmax for half in self.halves)

    @property
    def histogram(self) -> Histogram:
        """Both halves together."""
        both = Histogram()
        for half in self.halves:
            both.add(half.histogram)
        return both


def _joined(mine: Channels | None, theirs: Channels | None) -> Channels | None:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    return np.maximum(mine, theirs) if mine.shape == theirs.shape else VARIES


def summarize(array: Array, split: Split, axis: int | None) -> TensorSums:
    """Sums of one tensor of one batch.

    `array`: float32, any shape. `axis` holds the channels: 1 (convolutions), -1, or None for none.
    When an element is not finite, only `nonfinite` is counted.
    """
    sums = TensorSums()
    for half, part in zip(sums.halves, split.halves(array), strict=True):
        if part.size:
            _add_part(sums, half, part, axis)
    if not (sums.minimum > -math.inf and sums.maximum < math.inf) and array.size:
        return TensorSums(nonfinite=int(array.size - np.count_nonzero(np.isfinite(array))))
    return sums


def _add_part(sums: TensorSums, half: HalfSums, part: Array, axis: int | None) -> None:
    low, high = channel_extremes(part, axis)
    # NaN propagates; adding 0 makes -0 a 0, so that the order of the data leaves no trace
    minimum, maximum = float(low.min()) + 0.0, float(high.max()) + 0.0
    if not (math.isfinite(minimum) and math.isfinite(maximum)):
        sums.minimum = -math.inf
        return
    half.absmax = max(-minimum, maximum)
    half.histogram, total, squares = count(part, half.absmax)
    scale = Fraction(half.histogram.width)
    sums.total += Fraction(total) * scale
    sums.energy += Fraction(squares) * scale * scale
    sums.minimum, sums.maximum = min(sums.minimum, minimum), max(sums.maximum, maximum)
    if axis is not None and 1 < low.size <= MOST_CHANNELS:
        sums.channels = _joined(sums.channels, np.abs(np.maximum(-low, high)))


def channel_extremes(array: Array, axis: int | None) -> tuple[Array, Array]:
    """Smallest and largest value of each channel, each of shape (channels,)."""
    if axis == 1 and array.ndim >= 2:
        rows = array.reshape(array.shape[0], array.shape[1], -1)
        return rows.min(axis=2).min(axis=0), rows.max(axis=2).max(axis=0)
    if axis is None or array.ndim < 2:
        return array.min(keepdims=True).reshape(1), array.max(keepdims=True).reshape(1)
    matrix = array.reshape(-1, array.shape[-1])
    if matrix.shape[1] < _FEW_CHANNELS:
        columns = np.ascontiguousarray(matrix.T)
        return columns.min(axis=1), columns.max(axis=1)
    return matrix.min(axis=0), matrix.max(axis=0)
