"""What each calibration method is, slowly: loops over elements, bins and candidates."""

from __future__ import annotations

import math

import numpy as np

BINS, LEVELS = 2048, 128


def bin_width(absmax: float) -> float:
    """The smallest power of two with which absmax fits into 2,048 bins."""
    width = 2.0**-170
    while absmax > BINS * width:
        width *= 2
    return width


def histogram(values: np.ndarray) -> tuple[float, np.ndarray]:
    """Bin width, and counts of zeros and of ((k - 1) w, k w] for k = 1..2048, one value at a time."""
    magnitudes = [abs(float(x)) for x in values.reshape(-1)]
    counts = np.zeros(BINS + 1, np.int64)
    absmax = max(magnitudes, default=0.0)
    if not absmax:
        counts[0] = len(magnitudes)
        return 0.0, counts
    width = bin_width(absmax)
    for x in magnitudes:
        counts[math.ceil(x / width)] += 1
    return width, counts


def entropy_divergences(counts: np.ndarray) -> list[float]:
    """KL(P || Q) for every number of kept bins, as NVIDIA publishes it, bin by bin.

    `counts` holds zeros first, then 2,048 bins; the list begins at 128 kept bins and ends at the last bin
    that is not empty.
    """
    bins = counts[1:].astype(np.float64)
    bins[0] = bins[1]
    top = int(np.flatnonzero(counts[1:])[-1]) + 1
    return [_divergence(bins, kept) for kept in range(LEVELS, top + 1)]


def _divergence(bins: np.ndarray, kept: int) -> float:
    p = bins[:kept].copy()
    p[-1] += bins[kept:].sum()
    space = np.linspace(0, kept, LEVELS + 1)
    group = np.digitize(range(kept), space) - 1
    filled = bins[:kept] > 0
    sums = np.bincount(group, bins[:kept], LEVELS)
    spread_over = np.maximum(np.bincount(group, filled, LEVELS), 1)
    q = np.where(filled, (sums / spread_over)[group], 0.0)
    if not q.sum():
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    if np.any((p > 0) & (q == 0)):
        return math.inf
    alive = p > 0
    return float(np.sum(p[alive] * np.log(p[alive] / q[alive])))


def int8_error_energy(values: np.ndarray, limit: float) -> float:
    """Energy of the error of INT8 codes -127..127 with step limit / 127."""
    x = values.astype(np.float64).reshape(-1)
    step = limit / 127
    return float(((x - np.clip(np.rint(x / step), -127, 127) * step) ** 2).sum())


def clipped(values: np.ndarray, limit: float) -> tuple[float, float]:
    """Share of elements beyond limit, and energy of what is cut off over energy of all."""
    x = np.abs(values.astype(np.float64)).reshape(-1)
    return float((x > limit).mean()), float((np.maximum(x - limit, 0) ** 2).sum() / (x**2).sum())


def spread(counts: np.ndarray, width: float, absmax: float, per_bin: int = 1) -> np.ndarray:
    """Values that lie evenly in their bins, as the methods assume; `per_bin` for each that was counted."""
    found = [np.zeros(int(counts[0]) * per_bin)]
    top = int(np.flatnonzero(counts[1:])[-1]) + 1
    for k in range(1, top + 1):
        number = int(counts[k]) * per_bin
        end = absmax if k == top else k * width
        start = (k - 1) * width
        found.append(start + (np.arange(number) + 0.5) / max(number, 1) * (end - start))
    return np.concatenate(found)
