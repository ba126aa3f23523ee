"""What a tensor loses when it is quantized with one scale, as sums over batches. Pure NumPy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from diag.numerics.formats import FORMATS, Float, dequantize, quantize


class StepSums:
    """Sums over the batches of one tensor in one quantized format with one scale."""

    def __init__(self, scale: float, fmt: str) -> None:
        self.scale, self._format = scale, FORMATS[fmt]
        self._energy = self._noise = self._clipped = 0.0
        self._nonzero = self._zeroed = 0
        self._channels: NDArray[np.float32] | None = None
        self.absmax = 0.0

    def update(self, values: Float, axis: int = -1) -> None:
        """Take in one batch, any shape; channels lie along `axis`. What is not finite is left out."""
        finite: Float = np.where(np.isfinite(values), values, np.float32(0)).astype(np.float32)
        step = np.array(self.scale, np.float32)
        codes = quantize(finite, step, self._format)
        error = finite - dequantize(codes, step)
        beyond: Float = np.maximum(np.abs(finite) - np.float32(self.range), 0)
        self._energy += _energy(finite)
        self._noise += _energy(error)
        self._clipped += _energy(beyond)
        nonzero = finite != 0
        self._nonzero += int(np.count_nonzero(nonzero))
        self._zeroed += int(np.count_nonzero(nonzero & (codes.astype(np.float32) == 0)))
        self._take_channels(finite, axis)

    def _take_channels(self, values: Float, axis: int) -> None:
        """Largest magnitude by channel; a batch with another number of channels ends it."""
        if not values.size:
            return
        self.absmax = max(self.absmax, float(np.abs(values).max()))
        others = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
        found = np.abs(values).max(axis=others)
        if self._channels is None:
            self._channels = found
        elif self._channels.shape == found.shape:
            self._channels = np.maximum(self._channels, found)
        else:
            self._channels = np.zeros(0, np.float32)

    @property
    def range(self) -> float:
        """Magnitudes beyond it are clipped."""
        return self.scale * self._format.max

    @property
    def sqnr_db(self) -> float:
        """Energy of the values over that of their error, in dB; infinity without error."""
        if not self._noise:
            return math.inf
        return 10 * math.log10(self._energy / self._noise) if self._energy else -math.inf

    @property
    def clipped_energy_ratio(self) -> float:
        """Energy that is cut off over all energy."""
        return self._clipped / self._energy if self._energy else 0.0

    @property
    def zeroed_share(self) -> float:
        """Share of the elements that are not 0 and become it."""
        return self._zeroed / self._nonzero if self._nonzero else 0.0

    @property
    def outlier(self) -> tuple[int, float]:
        """The channel with the largest magnitude, and how many times the median channel's that is.

        (-1, 1.0) where there are fewer than three channels, or the number of them changes.
        """
        if self._channels is None or self._channels.size < 3:
            return -1, 1.0
        channel = int(self._channels.argmax())
        median = float(np.median(self._channels))
        return channel, float(self._channels[channel]) / median if median > 0 else math.inf


def _energy(values: Float) -> float:
    return float(np.square(values, dtype=np.float64).sum())
