"""How sure a figure is, when requests are what varies: elements of one request are not independent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

CONFIDENCE = 0.95
_Z = float(ndtri(0.5 + CONFIDENCE / 2))


def share_interval(total: float, squares: float, requests: int) -> tuple[float, float]:
    """95 % interval of a mean share, from its sum and sum of squares over requests.

    Wilson's interval with the effective number of observations p (1 - p) / variance of the mean (Dean and
    Pagano, 2015): it never leaves 0 to 1, and when every request shows 0 it is Wilson's with one
    observation a request.
    """
    if not requests:
        return 0.0, 1.0
    mean = min(max(total / requests, 0.0), 1.0)
    spread = max(squares / requests - mean * mean, 0.0) * requests / max(requests - 1, 1)
    effective = requests * mean * (1 - mean) / spread if spread > 0 else float(requests)
    return _wilson(mean, max(effective, float(requests)))


def _wilson(mean: float, number: float) -> tuple[float, float]:
    weight = _Z * _Z / number
    middle = (mean + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(mean * (1 - mean) / number + weight / (4 * number))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def range_interval(absmaxes: Sequence[float], requests: int) -> tuple[float, float]:
    """95 % interval of the largest magnitude that `requests` such requests would show.

    `absmaxes`: largest magnitude of each request of a sample. P(max <= x) = F(x)^n, F their distribution.
    """
    ordered = np.sort(np.asarray(absmaxes, np.float64))
    shares = np.array([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]) ** (1.0 / requests)
    places = np.clip(np.ceil(shares * ordered.size).astype(int) - 1, 0, ordered.size - 1)
    return float(ordered[places[0]]), float(ordered[places[1]])


def requests_needed(absmaxes: Sequence[float], within: float) -> int | None:
    """The least number of requests whose min-max range is known to `within`, as a share of its upper end.

    None when the sample is too small to say: the answer would be more than it holds.
    """
    for number in _doubling(len(absmaxes)):
        low, high = range_interval(absmaxes, number)
        if high <= 0 or (high - low) / high <= within:
            return number
    return None


def _doubling(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`."""
    numbers = sorted({base << power for power in range(32) for base in (1, 3)})
    return [number for number in numbers if number <= most]
