"""How sure a figure is, when requests are what varies: elements of one request are not independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def ratio_variance(sums: tuple[float, float], squares: tuple[float, float, float], requests: int) -> float:
    """Variance of the ratio of two sums over requests, sum a / sum b (linearization; Cochran, 1977, 6.4).

    `sums`: of a and of b; `squares`: of a^2, of a b, of b^2. Infinite for fewer than two requests.
    """
    (above, below), (aa, ab, bb) = sums, squares
    if requests < 2:
        return math.inf
    if not below:
        return 0.0
    ratio = above / below
    rest = max(aa - 2 * ratio * ab + ratio * ratio * bb, 0.0)
    return rest / below / below * requests / (requests - 1)


def share_interval(share: float, variance: float, requests: int) -> tuple[float, float]:
    """95 % interval of a mean share whose estimate has this variance.

    Wilson's interval with the effective number of observations p (1 - p) / variance (Dean and Pagano, 2015):
    it never leaves 0 to 1, and when no request shows any it is Wilson's with one observation a request.
    """
    if not requests or math.isinf(variance):
        return 0.0, 1.0
    mean = min(max(share, 0.0), 1.0)
    effective = mean * (1 - mean) / variance if variance > 0 else 0.0
    return _wilson(mean, max(effective, float(requests)))


def ratio_low(ratio: float, variance: float) -> float:
    """Lower end of the 95 % interval of a ratio; 0 when it rests on one request."""
    return max(ratio - _Z * math.sqrt(variance), 0.0)


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
