"""Where to clip: ranges of a symmetric quantizer (zero point 0) from a histogram of magnitudes.

All work is in units of the bin width: bin k spans (k - 1, k], and within a bin values count as spread evenly
(the last bin ends at the largest magnitude). A range is never larger than the largest magnitude, nor zero
unless that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diag.numerics.formats import FORMATS, symmetric_scale
from diag.numerics.histogram import BINS, Histogram

PERCENTILES = {
    "percentile_99": (99, 100),
    "percentile_99.9": (999, 1_000),
    "percentile_99.99": (9_999, 10_000),
    "percentile_99.999": (99_999, 100_000),
}
"""Name of each percentile method, and its share of elements as a fraction of integers."""

METHODS = ("minmax", *PERCENTILES, "entropy", "mse")
"""Everything that one pass gives, the widest range first."""

LEVELS = 128
"""Magnitudes that an INT8 code can have, zero included: the levels that the entropy method quantizes to."""

_STEPS = LEVELS - 1
"""Steps from zero to the end of the range."""

_COARSE = np.unique(np.round(2.0 ** np.arange(0, 11 + 1 / 16, 1 / 8)).astype(np.int64))
_FINE = 24

Double = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Clipping:
    """What a range costs, estimated from the histogram."""

    clipped_share: float
    """Share of the elements beyond the range."""
    clipped_energy_ratio: float
    """Energy of what clipping cuts off, sum (|x| - range)^2, over the energy of all, sum x^2."""
    noise_ratio: float
    """Energy of the whole INT8 error, rounding and clipping, over the energy of all."""


def ranges(histogram: Histogram, absmax: float) -> dict[str, float]:
    """The range of every method; 0 for each when the tensor is zero or empty."""
    if not absmax:
        return dict.fromkeys(METHODS, 0.0)
    found = {"minmax": absmax}
    found |= {name: percentile(histogram, absmax, *share) for name, share in PERCENTILES.items()}
    found["entropy"] = entropy(histogram, absmax)
    found["mse"] = mse(histogram, absmax)
    return {name: found[name] for name in METHODS}


def percentile(histogram: Histogram, absmax: float, numerator: int, denominator: int) -> float:
    """The smallest bin edge that numerator / denominator of the elements (zeros included) do not exceed.

    In integers throughout; at least one bin.
    """
    needed = -(-histogram.elements * numerator // denominator)
    edge = int(np.searchsorted(np.cumsum(histogram.counts), needed))
    return min(max(edge, 1) * histogram.width, absmax)


def entropy(histogram: Histogram, absmax: float) -> float:
    """The range that TensorRT's entropy calibrator takes: (m + 1/2) bins, see `divergences` for m.

    The half bin is in S. Migacz, "8-bit Inference with TensorRT", GTC 2017, S7310, and in caches that
    TensorRT writes.
    """
    found = divergences(histogram)
    last = len(found) - 1 - int(np.argmin(found[::-1]))
    return min((LEVELS + last + 0.5) * histogram.width, absmax)


def divergences(histogram: Histogram) -> Double:
    """KL divergence in nats of keeping the first m bins, for m from 128 to the last bin that is not empty.

    The algorithm of Migacz (S7310), in the form that NVIDIA publishes (TensorRT's pytorch-quantization,
    `_compute_amax_entropy`): the reference P keeps the counts of the first m bins, with everything beyond
    added to bin m; the candidate Q spreads each of 128 even groups of these bins, without what lies beyond,
    over the bins of the group that are not empty. The first bin (and zeros) count as many as the second:
    zeros are represented exactly by every scale. Infinite where Q is zero and P is not.

    In closed form: sum P log P and sum P log Q are differences of prefix sums over bins and over groups.
    """
    counts = histogram.counts[1:].copy()
    counts[0] = counts[1]
    kept = np.arange(LEVELS, histogram.top + 1)
    before = np.concatenate([[0], np.cumsum(counts)])
    beyond = before[-1] - before[kept]
    last = counts[kept - 1]
    grouped, level = _groups(counts, before, kept)
    plain = np.concatenate([[0.0], np.cumsum(_xlogx(counts))])
    own = plain[kept - 1] + _xlogx(last + beyond)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_kept = np.log(before[kept].astype(np.float64))
        other = grouped - before[kept] * log_kept
        other += np.where(beyond > 0, beyond * (np.log(level) - log_kept), 0.0)
    found = (own - other) / before[-1] - np.log(float(before[-1]))
    found[(before[kept] == 0) | ((beyond > 0) & (last == 0))] = np.inf
    return np.asarray(found)


def _groups(
    counts: NDArray[np.int64], before: NDArray[np.int64], kept: NDArray[np.int64]
) -> tuple[Double, Double]:
    """Of each m: the sum over groups of S log(S / n), and S / n of the last group.

    S is the number of elements in a group of bins and n the number of its bins that are not empty.
    """
    starts = _group_starts()[: len(kept)]
    filled = np.concatenate([[0.0], np.cumsum(counts > 0)])
    sums = np.diff(before.astype(np.float64)[starts], axis=1)
    level = sums / np.maximum(np.diff(filled[starts], axis=1), 1)
    logs = np.log(np.maximum(level, 1.0))
    return np.einsum("mg,mg->m", sums, logs), level[:, -1]


@lru_cache(maxsize=1)
def _group_starts() -> NDArray[np.intp]:
    """Where group g of m bins begins: the first bin at or after g m / 128. Shape (1921, 129), m from 128."""
    kept = np.arange(LEVELS, BINS + 1)
    return np.asarray(-(-(np.arange(LEVELS + 1) * kept[:, None]) // LEVELS))


def _xlogx(counts: NDArray[np.int64]) -> Double:
    return np.asarray(counts * np.log(np.maximum(counts, 1).astype(np.float64)))


def mse(histogram: Histogram, absmax: float) -> float:
    """The range with the least INT8 error energy, rounding and clipping together.

    Searched among the bin edges (and `absmax`): first eight in each octave, then up to 24 around the best.
    """
    end = absmax / histogram.width
    coarse = np.append(_COARSE[end > _COARSE], end)
    best = int(np.argmin(error_energy(histogram, absmax, coarse)))
    low, high = coarse[max(best - 1, 0)], coarse[min(best + 1, len(coarse) - 1)]
    between = np.unique(np.linspace(np.floor(low), np.floor(high), _FINE).astype(np.int64))
    fine = np.append(between[(between > 0) & (between < end)], coarse[best])
    best = int(np.argmin(error_energy(histogram, absmax, fine)))
    return float(fine[best]) * histogram.width


def error_energy(histogram: Histogram, absmax: float, limits: Double) -> Double:
    """Sum of (x - Q(x))^2 under each of `limits` (range in bin widths, shape (n,)), in squared bin widths.

    Q rounds to the nearest of -127..127 steps of limit / 127. The integral of the squared error over each
    bin is exact; nothing is assumed but that values are spread evenly within their bin.
    """
    edges, density = _density(histogram, absmax)
    return np.asarray(np.diff(error_integral(edges, limits[:, None]), axis=1) @ density)


def _density(histogram: Histogram, absmax: float) -> tuple[Double, Double]:
    """Edges of the bins up to the last that is filled, shape (bins + 1,), and elements per bin width."""
    top = histogram.top
    edges = np.arange(top + 1, dtype=np.float64)
    edges[-1] = absmax / histogram.width
    return edges, histogram.counts[1 : top + 1] / np.diff(edges)


def error_integral(edges: Double, limit: Double) -> Double:
    """Integral of (x - Q(x))^2 from 0 to each edge, for each limit: shape (limits, edges)."""
    step = limit / _STEPS
    inside = np.minimum(edges, limit) / step
    code = np.rint(inside)
    inside -= code
    inside *= inside * inside
    inside /= 3
    code /= 12
    inside += code
    inside *= step**3
    beyond = np.maximum(edges - limit, 0.0)
    inside += beyond * beyond * beyond / 3
    return np.asarray(inside)


def clipping(histogram: Histogram, absmax: float, energy: float, limit: float) -> Clipping:
    """What the range `limit` costs; `energy` is the sum of squares of all elements. All 0 without energy."""
    if not absmax or not energy:
        return Clipping(0.0, 0.0, 0.0)
    width = histogram.width
    edges, density = _density(histogram, absmax)
    end = limit / width
    over = np.maximum(edges - end, 0.0)
    share = float(np.diff(over) @ density) / histogram.elements
    cut = float(np.diff(over**3) @ density) / 3 * (width / energy * width)
    noise = float(error_energy(histogram, absmax, np.array([end]))[0]) * (width / energy * width)
    return Clipping(share, min(cut, 1.0), noise)


def is_coarse(histogram: Histogram) -> bool:
    """Whether the histogram cannot tell most values apart: 99 % of what is not zero in its first 16 bins.

    Then single values are more than 100 times as large as the rest, and the percentile, entropy and MSE
    ranges are only as fine as these bins.
    """
    nonzero = histogram.elements - int(histogram.counts[0])
    return nonzero > 0 and int(histogram.counts[1 : 1 + BINS // 128].sum()) * 100 >= nonzero * 99


def int8_error(values: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Q(x) - x for INT8 with range `limit`, as ONNX quantizes: ties to even, -128 to 127. Any shape."""
    scale = symmetric_scale(np.array(limit), FORMATS["int8"])
    error = values / scale
    np.rint(error, out=error)
    np.clip(error, -LEVELS, _STEPS, out=error)
    error *= scale
    error -= values
    return np.asarray(error)
