"""Activation statistics: what was counted of each tensor, in a form that adds up exactly in any order.

Everything is kept for two halves of the requests, which a hash of a request's inputs decides: the difference
between the halves is what equal data show against themselves. A request is one sample along axis 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diag.drift.bins import BINS, EDGES, FIRST, INNER, LAST_CODE, OUTER
from diag.drift.spread import Spread
from diag.numerics.exact import ExactSums
from diag.numerics.metrics import decibel

SCHEMA = "trtdiag.stats/1"

HALVES = 2
SAMPLED = 64
"""Requests of which single figures are kept: those with the smallest keys, a random sample."""
WORST = 8
"""Requests named for each tensor: those that the calibrated scale harms most."""

TALLIES = ("zeros", "subnormals", "nan", "positive_infinite", "negative_infinite", "requests", "bad_requests")
"""What is counted beside the bins. Subnormals are those of FP16, 0 < |x| < 2^-14. `bad_requests` held
elements that are not finite; their finite elements are in all other figures."""

MOMENTS = (
    "sum",  # of x
    "energy",  # of x^2
    "noise",  # of (x - Q(x))^2, Q the INT8 quantizer with the calibrated scale
    "clipped_energy",  # of (|x| - 127)^2 beyond the range
    "absmax",  # of the requests' largest magnitudes
    "absmax_squared",
    "energy_squared",
    "noise_squared",
    "noise_energy",
    "clipped_energy_squared",
    "clipped_energy_energy",
    "clipped_squared",  # clipped: elements of a request beyond the range
    "clipped_elements",
    "elements_squared",
)
"""Sums over requests, x in steps: of each request's own sum, or of squares and products of two of these."""

FIGURES = ("absmax", "clipped_energy_ratio", "noise_ratio")
"""What is kept of each sampled request: largest magnitude in steps, and shares of its energy."""

Kind = Literal["input", "activation", "output"]
ScaleFrom = Literal["table", "data", "unit"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that is counted."""

    name: str
    kind: Kind
    range: float
    """Values beyond +-range are clipped; a step is range / 127. Above 0."""
    scale_from: ScaleFrom
    """`table`: calibrated; `data`: largest magnitude of these very data; `unit`: not calibrated, the step is
    1 for integers and 1/32 for others, and what the scale costs means nothing."""

    @property
    def step(self) -> float:
        return self.range / LAST_CODE


@dataclass(frozen=True, slots=True)
class Source:
    """What the statistics were taken from."""

    batches: int = 0
    requests: int = 0
    """Requests that were counted."""
    seen: int = 0
    """Requests that went by, counted or not; 0 where all were counted."""
    dropped: int = 0
    """Requests chosen for counting that were dropped, because the queue was full."""
    errors: int = 0
    """Requests that could not be counted."""
    last_error: str = ""
    identity: int = 0
    """Sum of the hashes of all requests' inputs, modulo 2^256."""
    seeds: frozenset[int] = frozenset()
    """Seeds of random data."""
    begun: float = math.inf
    ended: float = -math.inf
    """When the data were seen, in seconds since 1970 (UTC); infinities when that is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """One tensor by channels; only where asked for."""

    absmax: NDArray[np.float32]
    """Largest magnitude of each channel, shape (channels,)."""
    sums: ExactSums
    """Sums of x, then of x^2 of every channel: 2 * channels sums."""
    elements: int
    """Finite and not, in each channel."""


VARIES = Channels(np.zeros(0, np.float32), ExactSums.zeros(0), 0)
"""Stands for the channels of a tensor whose number of channels depends on the data."""


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of some tensors of a model, in graph order. T tensors; axis 1 are the two halves."""

    model_sha256: str
    table_sha256: str | None
    """SHA-256 of the calibration table whose scales are the steps; None without one."""
    tensors: tuple[Tensor, ...]
    counts: NDArray[np.int64]
    """Elements by bin, shape (T, 2, BINS); see `diag.drift.bins`."""
    tallies: NDArray[np.int64]
    """Shape (T, 2, len(TALLIES))."""
    extremes: NDArray[np.float64]
    """Smallest and largest finite value, shape (T, 2, 2); +inf and -inf while there is none."""
    moments: ExactSums
    """T * 2 * len(MOMENTS) sums, in this order."""
    sample_keys: NDArray[np.uint64]
    """Keys of the sampled requests, rising, shape (K,), K up to `SAMPLED`."""
    sample: NDArray[np.float32]
    """Shape (T, K, len(FIGURES)), 8 bits of mantissa; NaN where the tensor cannot be told by requests."""
    worst_keys: NDArray[np.uint64]
    """Keys of the worst requests, worst first, shape (T, WORST)."""
    worst: NDArray[np.float32]
    """Their noise over energy, shape (T, WORST): infinite for a bad request, -1 where there is no request."""
    labels: Mapping[int, str]
    """Names of the requests, by key."""
    channels: Mapping[str, Channels] = field(default_factory=dict)
    source: Source = field(default_factory=Source)

    @cached_property
    def index(self) -> dict[str, int]:
        """Place of each tensor, by name."""
        return {tensor.name: place for place, tensor in enumerate(self.tensors)}

    @cached_property
    def moment_values(self) -> NDArray[np.float64]:
        """The sums as float64, shape (T, 2, len(MOMENTS))."""
        return self.moments.floats().reshape(len(self.tensors), HALVES, len(MOMENTS))

    def __getitem__(self, name: str) -> TensorStats:
        """One tensor. Raises KeyError."""
        return TensorStats(self, self.index[name])

    def __iter__(self) -> Iterator[TensorStats]:
        return (TensorStats(self, place) for place in range(len(self.tensors)))

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor's statistics, over both halves unless `half` is 0 or 1."""

    stats: Stats
    place: int
    half: int | None = None

    @property
    def tensor(self) -> Tensor:
        return self.stats.tensors[self.place]

    @property
    def halves(self) -> tuple[TensorStats, TensorStats]:
        """The two halves of the requests."""
        return TensorStats(self.stats, self.place, 0), TensorStats(self.stats, self.place, 1)

    def _of(self, array: NDArray[Any]) -> NDArray[Any]:
        found = array[self.place]
        return np.asarray(found.sum(axis=0) if self.half is None else found[self.half])

    @property
    def counts(self) -> NDArray[np.int64]:
        """Elements by bin, shape (BINS,)."""
        return self._of(self.stats.counts)

    def tally(self, name: str) -> int:
        """One of `TALLIES`."""
        return int(self._of(self.stats.tallies)[TALLIES.index(name)])

    def moment(self, name: str) -> float:
        """One of `MOMENTS`: a sum over requests, x in steps."""
        return float(self._of(self.stats.moment_values)[MOMENTS.index(name)])

    @property
    def elements(self) -> int:
        """Finite elements."""
        return int(self.counts.sum())

    @property
    def nonfinite(self) -> int:
        return sum(self.tally(name) for name in ("nan", "positive_infinite", "negative_infinite"))

    @property
    def requests(self) -> int:
        """Requests in which the tensor was seen; a tensor that cannot be told by requests has one a batch."""
        return self.tally("requests")

    @property
    def clipped(self) -> int:
        """Elements beyond the range."""
        counts = self.counts
        return int(counts[:OUTER].sum() + counts[OUTER + INNER :].sum())

    @property
    def minimum(self) -> float:
        found = self.stats.extremes[self.place, :, 0]
        return float(found.min() if self.half is None else found[self.half])

    @property
    def maximum(self) -> float:
        found = self.stats.extremes[self.place, :, 1]
        return float(found.max() if self.half is None else found[self.half])

    @property
    def absmax(self) -> float:
        """Largest finite magnitude; 0 when there is none."""
        return max(-self.minimum, self.maximum, 0.0)

    @property
    def mean(self) -> float:
        """Of the finite elements, not in steps; 0 when there is none."""
        return self.moment("sum") * self.tensor.step / max(self.elements, 1)

    @property
    def rms(self) -> float:
        """Root mean square, not in steps."""
        return math.sqrt(self.moment("energy") / max(self.elements, 1)) * self.tensor.step

    @property
    def sqnr_db(self) -> float:
        """SQNR of the tensor itself in INT8 with the calibrated scale, as it was measured element by element;
        infinite without error, and for a tensor of zeros."""
        energy = self.moment("energy")
        return decibel(energy, self.moment("noise")) if energy else math.inf

    def spread(self) -> Spread:
        """The bins as a spread: edges in steps; the outermost ones end at the extremes."""
        counts = self.counts.astype(np.float64)
        zeros = self.tally("zeros")
        counts[FIRST] -= zeros
        edges = EDGES.copy()
        edges[0] = min(edges[0], self.minimum / self.tensor.step)
        edges[-1] = max(edges[-1], self.maximum / self.tensor.step)
        return Spread(edges, counts, float(zeros))

    @property
    def sample(self) -> NDArray[np.float32]:
        """Figures of the sampled requests in which the tensor can be told by requests, shape (n, 3)."""
        found = self.stats.sample[self.place]
        kept = ~np.isnan(found[:, 0])
        if self.half is not None:
            kept &= (self.stats.sample_keys & np.uint64(1)) == self.half
        return np.asarray(found[kept])

    @property
    def worst(self) -> list[tuple[str, float]]:
        """The worst requests of both halves: label, and noise over energy (infinite: not finite)."""
        damage, keys = self.stats.worst[self.place], self.stats.worst_keys[self.place]
        return [(self.stats.labels[int(k)], float(d)) for k, d in zip(keys, damage, strict=True) if d >= 0]

    @property
    def channels(self) -> Channels | None:
        """None where they were not asked for, or their number depends on the data."""
        found = self.stats.channels.get(self.tensor.name)
        return None if found is None or not found.absmax.size else found


def empty_stats(
    model_sha256: str, table_sha256: str | None, tensors: tuple[Tensor, ...], source: Source | None = None
) -> Stats:
    """Statistics of nothing yet."""
    size = len(tensors)
    return Stats(
        model_sha256,
        table_sha256,
        tensors,
        np.zeros((size, HALVES, BINS), np.int64),
        np.zeros((size, HALVES, len(TALLIES)), np.int64),
        np.tile(np.array([math.inf, -math.inf]), (size, HALVES, 1)),
        ExactSums.zeros(size * HALVES * len(MOMENTS)),
        np.zeros(0, np.uint64),
        np.zeros((size, 0, len(FIGURES)), np.float32),
        np.zeros((size, WORST), np.uint64),
        np.full((size, WORST), -1, np.float32),
        {},
        source=source or Source(),
    )
