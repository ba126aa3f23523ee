"""How sure a verdict is that rests on a few batches: bootstrap intervals of the damage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000
_SEED = 0
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Evidence:
    """Mean damage over batches (1 at the target), and the interval that holds it."""

    mean: float
    low: float
    high: float
    batches: int
    needed: int
    """Batches from which the interval would be narrower than the gap to the target, at this spread."""

    @property
    def decides(self) -> bool:
        """Whether the target lies outside the interval."""
        return not self.low <= 1.0 <= self.high


def evidence(damages: Sequence[float]) -> Evidence:
    """95 % percentile bootstrap interval (Efron 1979) of the mean damage of one batch.

    Fixed seed: equal damages give equal intervals. With infinite damage the interval is what it is of the
    rest; one batch gives the interval of one point, which says nothing of others. Raises ValueError without
    any.
    """
    if not damages:
        raise ValueError("no damage was measured")
    values = np.array(damages, np.float64)
    if not np.isfinite(values).all():
        return Evidence(math.inf, math.inf, math.inf, len(values), len(values))
    drawn = np.random.default_rng(_SEED).integers(0, len(values), (_RESAMPLES, len(values)))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(values[drawn].mean(axis=1), [tail, 1 - tail])
    mean = float(values.mean())
    gap = abs(mean - 1.0)
    half = (high - low) / 2
    needed = math.ceil(len(values) * (half / gap) ** 2) if gap > 0 else 10 * len(values)
    return Evidence(mean, float(low), float(high), len(values), max(needed, len(values) + 1))
