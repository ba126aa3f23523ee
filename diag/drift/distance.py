"""What a calibrated range does to values, and how far two spreads are apart: pure functions, in steps.

All are functions of shares, so none grows with the number of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.drift.spread import LAST_CODE, Double, Spread, counts_between, cumulative, quantile
from diag.numerics.calibrate import error_integral
from diag.numerics.metrics import decibel

MOST_DB = 300.0
"""Stands for no error at all."""

_CODE_EDGES = np.array([0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 63.5, LAST_CODE])
"""Bins of codes for PSI and Jensen-Shannon: octaves of the code, and what is clipped."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Mean squares per element, in squared steps."""

    rounding: float
    """Of the error inside the range."""
    clipped: float
    """Of what the range cuts off: (|x| - range)^2."""
    signal: float
    """Of the values themselves."""

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); 300 without noise."""
        return min(decibel(self.signal, self.rounding + self.clipped), MOST_DB) if self.signal else MOST_DB

    @property
    def clipped_energy_ratio(self) -> float:
        return min(self.clipped / self.signal, 1.0) if self.signal else 0.0


def noise(spread: Spread, limit: float = LAST_CODE) -> Noise:
    """The INT8 error of a spread under the range +-`limit` (in steps; 127 codes each way, zero point 0).

    The integral of (x - Q(x))^2 over each bin is exact: nothing is assumed but that values lie evenly
    between two edges. For wide signals it is the textbook's step^2 / 12, plus the clipped energy.
    """
    folded = spread.magnitudes()
    total, edges = max(folded.elements, 1.0), folded.edges
    density = folded.counts / np.diff(edges)
    if limit <= 0:
        return Noise(0.0, _second_moment(edges, density) / total, _second_moment(edges, density) / total)
    whole = float(np.diff(error_integral(edges, np.array(limit))) @ density) / total
    beyond = np.maximum(edges - limit, 0.0)
    clipped = float(np.diff(beyond**3) @ density) / 3 / total
    return Noise(max(whole - clipped, 0.0), clipped, _second_moment(edges, density) / total)


def _second_moment(edges: Double, density: Double) -> float:
    return float(np.diff(edges**3) @ density) / 3


def saturation(spread: Spread, limit: float = LAST_CODE) -> float:
    """Share of the elements beyond +-`limit`."""
    folded = spread.magnitudes()
    _, within = cumulative(folded, np.array([limit]))
    return max(1.0 - float(within[0]), 0.0) if folded.elements else 0.0


OUTER = 0.9999
"""The quantile that stands for the end of the values: p99.99, as a single outlier moves a maximum."""


def overflow(spread: Spread, limit: float = LAST_CODE) -> float:
    """p99.99 of |x| over the range: above 1, more than one value in 10,000 is clipped."""
    return quantile(spread, OUTER) / limit


def under_use(spread: Spread, limit: float = LAST_CODE) -> float:
    """The range over p99.99 of |x|: 2 means that one of the eight bits is idle. Infinity for zeros only."""
    end = quantile(spread, OUTER)
    return limit / end if end else math.inf


def wasserstein(first: Spread, second: Spread) -> float:
    """Wasserstein-1 distance in steps: the integral of |F - G|, exact for values that lie evenly in bins.

    Of magnitudes, unless both spreads are signed.
    """
    first, second = _alike(first, second)
    grid = np.unique(np.concatenate([first.edges, second.edges, [0.0]]))
    before, after = (
        np.subtract(a, b) for a, b in zip(cumulative(first, grid), cumulative(second, grid), strict=True)
    )
    start, end = after[:-1], before[1:]
    same = start * end >= 0
    size = np.abs(start) + np.abs(end)
    crossing = (start**2 + end**2) / np.where(size > 0, 2 * size, 1.0)
    return float(np.where(same, size / 2, crossing) @ np.diff(grid))


def _alike(first: Spread, second: Spread) -> tuple[Spread, Spread]:
    if first.signed and second.signed:
        return first, second
    return first.magnitudes(), second.magnitudes()


def code_shares(first: Spread, second: Spread) -> tuple[Double, Double]:
    """Shares of both spreads in fixed bins of codes, each bin lifted by half an element so that none is 0."""
    first, second = _alike(first, second)
    signed = first.signed
    inner = np.concatenate([-_CODE_EDGES[::-1], _CODE_EDGES] if signed else [[0.0], _CODE_EDGES])
    far = 1 + max(abs(float(e)) for s in (first, second) for e in (s.edges[0], s.edges[-1], LAST_CODE))
    edges = np.concatenate([[-far], inner, [far]] if signed else [inner, [far]])
    return _lifted(counts_between(first, edges)), _lifted(counts_between(second, edges))


def _lifted(counts: Double) -> Double:
    return np.asarray((counts + 0.5) / (counts.sum() + 0.5 * counts.size))


def psi(first: Double, second: Double) -> float:
    """Population stability index of two vectors of shares: sum (p - q) ln(p / q)."""
    return float((first - second) @ np.log(first / second))


def jensen_shannon(first: Double, second: Double) -> float:
    """Jensen-Shannon divergence of two vectors of shares, in bits (0 to 1)."""
    middle = (first + second) / 2
    nats = (first @ np.log(first / middle) + second @ np.log(second / middle)) / 2
    return float(nats / math.log(2))


def used_codes(spread: Spread) -> NDArray[np.bool_]:
    """Which codes hold at least one element: shape (255,) for a signed spread (-127 to 127), else (128,)."""
    last = int(LAST_CODE)
    first = -last if spread.signed else 0
    edges = np.arange(first, last + 2, dtype=np.float64) - 0.5
    edges[0] = min(edges[0], float(spread.edges[0]))
    edges[-1] = max(edges[-1], float(spread.edges[-1]))
    return np.asarray(counts_between(spread, edges) >= 0.5)


def dead_codes(calibration: Spread, production: Spread) -> float:
    """Share of the codes that calibration used and production does not."""
    calibration, production = _alike(calibration, production)
    before, now = used_codes(calibration), used_codes(production)
    return int((before & ~now).sum()) / max(int(before.sum()), 1)


def channels_alive(calibration: Double, production: Double, least: float = 1.0) -> NDArray[np.intp]:
    """Channels that calibration rounds to zero throughout and production does not, shape (n,).

    `calibration`, `production`: largest magnitude of each channel in steps. A channel is alive from `least`.
    """
    return np.flatnonzero((calibration <= 0.5) & (production >= least))
