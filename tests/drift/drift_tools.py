"""Calibration tables and production data of synthetic tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from diag.calibration.measurement import Measurement, table_of
from diag.calibration.sums import HalfSums, TensorSums
from diag.calibration.table import CalibrationTable
from diag.drift.side import Side
from diag.drift.spread import spread_of
from diag.numerics.histogram import count

MODEL = "a" * 64
EDGES = np.unique(
    np.concatenate([np.arange(-128, 128.25, 0.25), *(s * np.geomspace(128, 1e6, 800) for s in (-1, 1))])
)


def sums(halves: Sequence[np.ndarray]) -> TensorSums:
    """The exact sums of two halves of values."""
    found = TensorSums()
    for half, values in zip(found.halves, halves, strict=True):
        values = values.astype(np.float32)
        half.absmax = float(np.abs(values).max())
        half.histogram, total, squares = count(values, half.absmax)
        scale = Fraction(half.histogram.width)
        found.total += Fraction(total) * scale
        found.energy += Fraction(squares) * scale * scale
        found.minimum = min(found.minimum, float(values.min()))
        found.maximum = max(found.maximum, float(values.max()))
    assert isinstance(found.halves[0], HalfSums)
    return found


def table(tensors: Mapping[str, Sequence[np.ndarray]], method: str = "minmax") -> CalibrationTable:
    """A table of tensors, each given as the values of two halves, in graph order."""
    measured = Measurement({name: sums(halves) for name, halves in tensors.items()}, 64, (32, 32))
    return table_of(measured, MODEL, method)


def production(values: np.ndarray, step: float) -> Side:
    """The side of an array of production values."""
    steps = values / step
    return Side(spread_of(steps, EDGES), float(steps.min()), float(steps.max()))
