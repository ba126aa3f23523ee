"""Error of linear layers' outputs when both operands are rounded, on rows of their input.

Two views of it count, by their geometric mean: noise over signal of each output vector, all vectors alike,
as in `diag.calibration.best`; and energy over energy. The first alone does not see what happens to the few
vectors that hold the largest values: in MiniLM, clipping weights of FFN-down by it gained 1.4 dB a layer
and cost the outputs (padding included) 14 dB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.calibration.best import alive_vectors
from diag.numerics.formats import FORMATS, dequantize, quantize, symmetric_scale

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Rounding:
    """How a site is quantized: the format, the range of its tensor, the step ratios of each weight."""

    format: str
    limit: float
    ratios: tuple[Float | None, ...]
    """For each weight: factors on the min-max steps of its columns; None: 1."""

    def activation(self, rows: Float) -> Float:
        """Rows as the quantizer passes them on."""
        return rounded_activation(rows, self.format, self.limit)

    def weight(self, number: int, values: Float) -> Float:
        """A weight, shape (channels, outputs), as its codes give it back."""
        ratio = self.ratios[number]
        return rounded_channels(values, self.format, 1.0 if ratio is None else ratio)


def rounded_activation(values: Float, fmt: str, limit: float) -> Float:
    """Values of any shape as a quantizer of that range passes them on."""
    scale = symmetric_scale(np.array(limit), FORMATS[fmt])
    return dequantize(quantize(values, scale, FORMATS[fmt]), scale)


def rounded_channels(values: Float, fmt: str, ratio: Float | float = 1.0, axis: int = 1) -> Float:
    """A weight quantized with one scale for each index of `axis`, min-max times `ratio`."""
    others = tuple(i for i in range(values.ndim) if i != axis)
    scale = symmetric_scale(np.abs(values).max(axis=others) * ratio, FORMATS[fmt])
    return dequantize(quantize(values, scale, FORMATS[fmt], axis), scale, axis)


class Reference:
    """Outputs of the layers that read a tensor, on some rows of it."""

    def __init__(self, rows: Float, weights: Sequence[Float]) -> None:
        """`rows`: (vectors, channels); each weight: (channels, outputs)."""
        self.rows = rows
        self.outputs = [rows @ weight for weight in weights]
        self._signals = [_energies(output) for output in self.outputs]

    def noise(self, rows: Float, weights: Sequence[Float]) -> list[float]:
        """Noise over signal of each layer, given its operands as the quantizers pass them on."""
        return [self.noise_of(number, rows @ weight) for number, weight in enumerate(weights)]

    def noise_of(self, number: int, output: Float) -> float:
        """The same of one layer's output."""
        signal = self._signals[number]
        alive = alive_vectors(signal)
        error = _energies(output - self.outputs[number])
        if not alive.any():
            return 0.0
        return math.sqrt(float((error[alive] / signal[alive]).mean()) * float(error.sum() / signal.sum()))

    def row_weights(self, number: int) -> Float:
        """1 / |output| of each row, by which rows count alike in a sum of squares; 0 for dead rows."""
        signal = self._signals[number]
        alive = alive_vectors(signal)
        return np.where(alive, 1 / np.sqrt(np.where(alive, signal, 1)), 0).astype(np.float32)


def _energies(output: Float) -> NDArray[np.float64]:
    return np.asarray(np.square(output, dtype=np.float64).sum(axis=-1))


def gain_db(before: float, after: float) -> float:
    """By how many dB noise fell; 0 where there was none."""
    if before <= 0:
        return 0.0
    return 10 * math.log10(before / max(after, before * 1e-30))
