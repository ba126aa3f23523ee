"""What a remedy would gain, predicted from histograms, and which requests to calibrate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.drift import distance
from diag.drift.compare import Pair
from diag.drift.spread import LAST_CODE, Spread, absmax, quantile

FP16_SQNR_DB = 20 * float(np.log10(2.0**11))
"""What FP16 keeps at least of a tensor in its range: its unit roundoff is 2^-11."""

_ENOUGH = 0.98
"""A coreset is done when it reaches this share of all drifted ranges."""
MOST_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Remedy:
    """One tensor's SQNR on production, in dB, now and with other ranges."""

    now_db: float
    recalibrated_db: float
    """With the range that the same method takes on production."""
    best_db: float
    """With the range that has the least error on production."""


def remedy(pair: Pair) -> Remedy:
    """What other ranges would gain for a tensor."""
    production = pair[1]
    spread = production.spread
    recalibrated = distance.noise(spread, recalibrated_limit(pair)).sqnr_db
    best = max(recalibrated, distance.noise(spread, best_limit(spread)).sqnr_db)
    return Remedy(production.noise.sqnr_db, recalibrated, best)


def recalibrated_limit(pair: Pair) -> float:
    """The range that leaves the same share of production outside as calibration left of its own data, in
    steps of the present scale; production's largest magnitude where that was none."""
    calibration, production = pair
    beyond = calibration.saturation
    found = quantile(production.spread, 1 - beyond) if beyond else absmax(production.spread)
    return found or LAST_CODE


def best_limit(spread: Spread) -> float:
    """The range with the least error, of 64 between the median and the largest magnitude (in steps)."""
    end = absmax(spread)
    if not end:
        return LAST_CODE
    start = max(quantile(spread, 0.5), end / 4096)
    limits = np.geomspace(start, end, 64) if start < end else np.array([end])
    return float(max(limits, key=lambda limit: distance.noise(spread, float(limit)).sqnr_db))


def coreset(reach: NDArray[np.floating], labels: Sequence[str]) -> list[str]:
    """Requests that together reach the drifted ranges, the one that adds the most first.

    `reach`: largest magnitude of each request in each drifted tensor, shape (tensors, requests). Greedy,
    which for this objective (sum over tensors of the largest share reached) is within 1 - 1/e of the best
    choice of as many requests (Nemhauser, Wolsey and Fisher, 1978).
    """
    if not reach.size:
        return []
    share = reach / np.maximum(reach.max(axis=1, keepdims=True), 1e-30)
    covered, chosen = np.zeros(share.shape[0]), list[str]()
    while covered.mean() < _ENOUGH and len(chosen) < min(MOST_REQUESTS, share.shape[1]):
        gains = np.maximum(share - covered[:, None], 0.0).sum(axis=0)
        best = int(np.argmax(gains))
        covered = np.maximum(covered, share[:, best])
        chosen.append(labels[best])
    return chosen
