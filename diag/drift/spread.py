"""How the values of a tensor are spread, in steps of its calibrated scale.

A step is range / 127, so the calibrated range ends at 127. Between two edges values count as spread evenly;
exact zeros are counted apart, since every scale represents them without error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Double = NDArray[np.float64]

LAST_CODE = 127.0
"""Where the calibrated range ends, in steps."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Counts between edges. Signed or of magnitudes (then the first edge is not negative)."""

    edges: Double
    """Shape (bins + 1,), finite, rising, in steps."""
    counts: Double
    """Shape (bins,): elements between the edges that are not zero."""
    zeros: float
    """Elements that are exactly zero."""

    @property
    def elements(self) -> float:
        return float(self.counts.sum()) + self.zeros

    @property
    def signed(self) -> bool:
        return bool(self.edges[0] < 0)

    def magnitudes(self) -> Spread:
        """The spread of |x|: negative bins laid over the positive ones."""
        if not self.signed:
            return self
        grid = np.unique(np.abs(self.edges))
        grid = grid if grid[0] == 0 else np.concatenate([[0.0], grid])
        below = _mass_below(self, grid) - _mass_below(self, -grid)
        return Spread(grid, np.maximum(np.diff(below), 0.0), self.zeros)

    def scaled(self, factor: float) -> Spread:
        """The same values in steps that are 1 / `factor` as large."""
        return Spread(self.edges * factor, self.counts, self.zeros)


def spread_of(values: NDArray[np.floating], edges: Double) -> Spread:
    """The spread of an array, any shape, already in steps. Values beyond the edges raise ValueError."""
    flat = np.asarray(values, np.float64).reshape(-1)
    nonzero = flat[flat != 0]
    counts, _ = np.histogram(nonzero, edges)
    if int(counts.sum()) != nonzero.size:
        raise ValueError("values lie beyond the edges")
    return Spread(np.asarray(edges, np.float64), counts.astype(np.float64), float(flat.size - nonzero.size))


def joined(parts: list[Spread]) -> Spread:
    """Several spreads together, on the union of their edges. At least one."""
    if all(np.array_equal(part.edges, parts[0].edges) for part in parts):
        counts = np.sum([part.counts for part in parts], axis=0)
        return Spread(parts[0].edges, counts, sum(part.zeros for part in parts))
    grid = np.unique(np.concatenate([part.edges for part in parts]))
    counts = np.sum([np.diff(_mass_below(part, grid)) for part in parts], axis=0)
    return Spread(grid, counts, sum(part.zeros for part in parts))


def _mass_below(spread: Spread, points: Double) -> Double:
    """Elements that are not zero and at most each of `points`."""
    total = np.concatenate([[0.0], np.cumsum(spread.counts)])
    return np.asarray(np.interp(points, spread.edges, total), np.float64)


def cumulative(spread: Spread, points: Double) -> tuple[Double, Double]:
    """Share of the elements below each of `points`, and at most it (they differ at zero)."""
    total = max(spread.elements, 1.0)
    below = _mass_below(spread, points)
    before, after = below + spread.zeros * (points > 0), below + spread.zeros * (points >= 0)
    return before / total, after / total


def counts_between(spread: Spread, edges: Double) -> Double:
    """Elements between each two of `edges`, shape (n - 1,). Zeros count where -0 < 0 <= +0 falls."""
    counts = np.diff(_mass_below(spread, edges))
    place = int(np.searchsorted(edges, 0.0, side="right")) - 1
    if 0 <= place < counts.size:
        counts[place] += spread.zeros
    return counts


def quantile(spread: Spread, share: float) -> float:
    """The magnitude that `share` of the elements do not exceed; 0 for an empty spread."""
    folded = spread.magnitudes()
    needed = share * folded.elements - folded.zeros
    if needed <= 0 or not folded.counts.any():
        return 0.0
    total = np.concatenate([[0.0], np.cumsum(folded.counts)])
    place = min(int(np.searchsorted(total, needed, side="left")), total.size - 1)
    low, high = total[place - 1], total[place]
    within = (min(needed, high) - low) / (high - low)
    return float(folded.edges[place - 1] + within * (folded.edges[place] - folded.edges[place - 1]))


def absmax(spread: Spread) -> float:
    """The outer edge of the outermost bin that is not empty; 0 for zeros only."""
    folded = spread.magnitudes()
    filled = np.flatnonzero(folded.counts)
    return float(folded.edges[filled[-1] + 1]) if filled.size else 0.0
