"""One side of a comparison: what is known of a tensor on the calibration data, or on production."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from diag.calibration.records import sums_of
from diag.calibration.sums import HalfSums
from diag.calibration.table import CalibrationTable, TensorRange
from diag.drift import distance
from diag.drift.distance import Noise
from diag.drift.requests import ratio_variance
from diag.drift.spread import Double, Spread, joined
from diag.drift.stats import HALVES, Stats, TensorStats


@dataclass(frozen=True, slots=True)
class Requests:
    """What varies from request to request, of one tensor."""

    number: int
    saturation_variance: float
    """Variance of the share of saturated elements, as an estimate of a ratio of sums over requests."""
    noise_variance: float
    """Variance of noise over energy, likewise."""
    absmax: Double
    """Largest magnitude of each request of a random sample, in steps, shape (n,)."""


@dataclass(frozen=True, slots=True)
class Side:
    """A tensor on one side, in steps of the calibrated scale."""

    spread: Spread
    minimum: float
    maximum: float
    halves: tuple[Side, ...] = ()
    """The two halves of the data; empty when they were not kept apart."""
    channels: Double | None = None
    """Largest magnitude of each channel, shape (channels,)."""
    nonfinite: int = 0
    """Elements that are NaN or infinite; they are in nothing else."""
    measured: Noise | None = None
    """The error where it was summed exactly instead of taken from the spread."""
    requests: Requests | None = None
    """How the figures vary from request to request, where that was kept."""

    @property
    def noise(self) -> Noise:
        """The INT8 error under the calibrated range."""
        return self.measured or distance.noise(self.spread)

    @property
    def saturation(self) -> float:
        """Share of the elements beyond the calibrated range."""
        return distance.saturation(self.spread)

    @property
    def absmax(self) -> float:
        """Largest magnitude in steps."""
        return max(-self.minimum, self.maximum, 0.0)

    def scaled(self, factor: float) -> Side:
        """The same values in steps 1 / `factor` as large; the error is then estimated from the spread."""
        return replace(
            self,
            spread=self.spread.scaled(factor),
            minimum=self.minimum * factor,
            maximum=self.maximum * factor,
            halves=tuple(half.scaled(factor) for half in self.halves),
            channels=None if self.channels is None else self.channels * factor,
            measured=None,
            requests=None,
        )


def sides_of_table(table: CalibrationTable, steps: Mapping[str, float] | None = None) -> dict[str, Side]:
    """What a calibration table knows of each tensor, in graph order.

    `steps`: the INT8 step of each tensor; None takes those of the table's own method. Raises TableError when
    the table holds no histograms.
    """
    used = table.scales("int8") if steps is None else steps
    return {name: _side(name, tensor, used[name]) for name, tensor in table.tensors.items() if name in used}


def sides_of_stats(stats: Stats, steps: Mapping[str, float] | None = None) -> dict[str, Side]:
    """What statistics know of each tensor, in graph order.

    `steps`: the INT8 step of each tensor, for tensors that are to be seen in other steps than they were
    counted in; what was summed element by element is then estimated from the spread.
    """
    found = {}
    for tensor in stats:
        side = _side_of(tensor, tuple(_side_of(half, ()) for half in tensor.halves if half.elements))
        factor = tensor.tensor.step / (steps or {}).get(tensor.tensor.name, tensor.tensor.step)
        found[tensor.tensor.name] = side if factor == 1 else side.scaled(factor)
    return found


def _side_of(tensor: TensorStats, halves: tuple[Side, ...]) -> Side:
    step, channels = tensor.tensor.step, tensor.channels
    low, high = (tensor.minimum, tensor.maximum) if tensor.elements else (0.0, 0.0)
    return Side(
        spread=_ended(tensor.spread(), low / step, high / step) if tensor.elements else EMPTY,
        minimum=low / step,
        maximum=high / step,
        halves=halves if len(halves) == HALVES else (),
        channels=None if channels is None else channels.absmax.astype(np.float64) / step,
        nonfinite=tensor.nonfinite,
        measured=_measured(tensor),
        requests=_requests(tensor),
    )


def _ended(spread: Spread, low: float, high: float) -> Spread:
    """The spread with its outermost bins that are not empty ending at the extremes."""
    filled = np.flatnonzero(spread.counts)
    if not filled.size:
        return spread
    edges, first, last = spread.edges.copy(), int(filled[0]), int(filled[-1])
    edges[last + 1] = min(max(high, np.nextafter(edges[last], np.inf)), edges[last + 1])
    edges[first] = max(min(low, np.nextafter(edges[first + 1], -np.inf)), edges[first])
    return Spread(edges, spread.counts, spread.zeros)


EMPTY = Spread(np.array([0.0, 1.0]), np.zeros(1), 0.0)


def _measured(tensor: TensorStats) -> Noise:
    elements = max(tensor.elements, 1)
    clipped = tensor.moment("clipped_energy") / elements
    return Noise(
        max(tensor.moment("noise") / elements - clipped, 0.0), clipped, tensor.moment("energy") / elements
    )


def _requests(tensor: TensorStats) -> Requests:
    moment, number = tensor.moment, tensor.requests
    saturation = ratio_variance(
        (tensor.clipped, tensor.elements),
        (moment("clipped_squared"), moment("clipped_elements"), moment("elements_squared")),
        number,
    )
    noise = ratio_variance(
        (moment("noise"), moment("energy")),
        (moment("noise_squared"), moment("noise_energy"), moment("energy_squared")),
        number,
    )
    return Requests(number, saturation, noise, tensor.sample[:, 0].astype(np.float64))


def _side(name: str, tensor: TensorRange, step: float) -> Side:
    sums = sums_of(name, tensor)
    halves = [_half(half, step) for half in sums.halves]
    channels = sums.channels
    return Side(
        spread=joined([half.spread for half in halves]),
        minimum=tensor.minimum / step,
        maximum=tensor.maximum / step,
        halves=tuple(halves) if all(half.histogram.elements for half in sums.halves) else (),
        channels=np.asarray(channels, np.float64) / step if channels is not None and channels.size else None,
        nonfinite=tensor.nonfinite,
    )


def _half(half: HalfSums, step: float) -> Side:
    """The magnitudes of one half; the last bin ends at the largest."""
    histogram, end = half.histogram, half.absmax / step
    top = histogram.top
    if not top:
        return Side(Spread(np.array([0.0, 1.0]), np.zeros(1), float(histogram.counts[0])), 0.0, 0.0)
    edges = np.arange(top + 1, dtype=np.float64) * (histogram.width / step)
    edges[-1] = end
    counts = histogram.counts[1 : top + 1].astype(np.float64)
    return Side(Spread(edges, counts, float(histogram.counts[0])), -end, end)
