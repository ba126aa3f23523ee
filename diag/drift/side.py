"""One side of a comparison: what is known of a tensor on the calibration data, or on production."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diag.calibration.records import sums_of
from diag.calibration.sums import HalfSums
from diag.calibration.table import CalibrationTable, TensorRange
from diag.drift import distance
from diag.drift.distance import Noise
from diag.drift.spread import Double, Spread, joined


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
    """Signal and clipped energy where they were summed exactly instead of taken from the spread."""

    @property
    def noise(self) -> Noise:
        """The INT8 error under the calibrated range."""
        return self.measured or distance.noise(self.spread)

    @property
    def saturation(self) -> float:
        """Share of the elements beyond the calibrated range."""
        return distance.saturation(self.spread)

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
        )


def sides_of_table(table: CalibrationTable, method: str | None = None) -> dict[str, Side]:
    """What a calibration table knows of each tensor, in graph order.

    Raises TableError when it holds no histograms, or no ranges of `method` (None: its own).
    """
    scales = table.scales("int8", method)
    return {name: _side(name, tensor, scales[name]) for name, tensor in table.tensors.items()}


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
