"""AWQ: scales of channels and steps of blocks that cost an INT4 layer's output least (Lin et al. 2023).

A channel that carries large activations is multiplied by `mean|x|^alpha` in the weights and divided by it in
the activation: its share of a block's rounding error shrinks. Then each block's step is shrunk where clipping
its largest weights costs the output less than rounding all others finer. Both are judged by the error of the
layer's output on sampled rows of its input, never by the error of the weights. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.numerics.blocks import block_absmax, split
from diag.numerics.formats import FORMATS, Float, round_to, symmetric_scale

ALPHAS = (0.0, 0.15, 0.3, 0.45, 0.6)
"""Strengths tried; 0 is no scaling at all. The paper searches 0 to 1; behind the search for steps, more than
0.6 was worse than none in every layer of MiniLM."""

CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of a block's largest weight that its step may be cut to; the paper stops at one half as well."""

LEAST_GAIN = 10**0.03
"""What a scale of channels must gain beyond shrunk steps, 0.3 dB: it costs a Mul in front of the layers."""

_CODES = (-8, 7)
_LARGEST_FACTOR = 1024.0
_SAMPLED_COLUMNS = 128
"""Output channels on which the strength is chosen."""

_COLUMNS = 4096
"""Output channels weighed at a time, so that a language model's head does not need gigabytes."""


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, reduction axis first: shape (channels, outputs), and the size of their blocks."""

    weight: Float
    size: int


def channel_factors(mean_magnitude: Float, alpha: float) -> Float:
    """`mean|x|^alpha` of each channel, the largest and the smallest as far from 1 (Lin et al., eq. 5).

    Rounded to 8 bits of mantissa. Channels that never carry anything keep 1.
    """
    magnitude = np.asarray(mean_magnitude, np.float64)
    alive = magnitude > 0
    factors = np.ones(magnitude.shape)
    factors[alive] = magnitude[alive] ** alpha
    if alive.any():
        factors[alive] /= np.sqrt(factors[alive].max() * factors[alive].min())
    bounded = np.clip(factors, 1 / _LARGEST_FACTOR, _LARGEST_FACTOR).astype(np.float32)
    return round_to(bounded, FORMATS["bf16"])


def rounding_error(layer: Layer, factors: Float, ratios: Float | None = None) -> Float:
    """By how much INT4 moves the weights that the layer multiplies with in effect: scaled, rounded, divided.

    `ratios` shrink the steps: shape (blocks, outputs). Shape (blocks, elements of a block, outputs).
    """
    scaled = layer.weight * factors[:, None]
    steps = block_steps(scaled, 0, layer.size, ratios)[:, None, :]
    blocks = split(scaled, 0, layer.size)
    moved = blocks / steps  # in place from here on: this is where the search's time goes
    np.rint(moved, out=moved)
    np.clip(moved, *_CODES, out=moved)
    moved *= steps
    moved -= blocks
    moved /= factors.reshape(-1, layer.size, 1)
    return np.asarray(moved, np.float32)


def block_steps(weight: Float, axis: int, size: int, ratios: Float | None = None) -> Float:
    """INT4's step for each block: its largest magnitude, cut by `ratios`, over 7."""
    absmax = block_absmax(weight, axis, size)
    return symmetric_scale(absmax if ratios is None else absmax * ratios, FORMATS["int4"])


def noise_share(layer: Layer, rows: Float, factors: Float, ratios: Float | None = None) -> float:
    """Noise over signal of the layer's output for `rows` of its input, shape (rows, channels)."""
    noise = signal = 0.0
    for columns in _columns(layer):
        part = _take(layer, columns)
        cut = None if ratios is None else ratios[:, columns]
        noise += _energy(rows @ rounding_error(part, factors, cut).reshape(part.weight.shape))
        signal += _energy(rows @ part.weight)
    return noise / signal if signal > 0 else 0.0


def best_alpha(layers: Sequence[Layer], rows: Float, mean_magnitude: Float) -> float:
    """The strength with the least noise over the layers that read one tensor, each with its best steps.

    0 unless a scale gains `LEAST_GAIN`.
    """
    some = [_take(layer, _evenly(layer.weight.shape[1])) for layer in layers]

    def cost(alpha: float) -> float:
        factors = channel_factors(mean_magnitude, alpha)
        return sum(noise_share(x, rows, factors, best_ratios(x, rows, factors)) for x in some)

    costs = {alpha: cost(alpha) for alpha in ALPHAS}
    alpha = min(costs, key=lambda alpha: costs[alpha])
    return alpha if costs[alpha] * LEAST_GAIN < costs[0.0] else 0.0


def best_ratios(layer: Layer, rows: Float, factors: Float) -> Float:
    """For each block and output channel the ratio whose noise on its part of the sum is least."""
    found = np.empty((layer.weight.shape[0] // layer.size, layer.weight.shape[1]), np.float32)
    blocks = np.ascontiguousarray(split(rows, 1, layer.size).transpose(1, 0, 2))
    products = (
        blocks.transpose(0, 2, 1) @ blocks
    )  # the noise of an error e is e' products e, whatever the rows
    for columns in _columns(layer):
        part, ratios = _take(layer, columns), found[:, columns]
        least = np.full(ratios.shape, np.inf, np.float32)
        for ratio in CLIP_RATIOS:
            error = rounding_error(part, factors, np.full(ratios.shape, ratio, np.float32))
            noise = np.einsum("bkn,bkn->bn", products @ error, error)
            ratios[noise < least] = ratio
            np.minimum(noise, least, out=least)
    return found


def _columns(layer: Layer) -> list[slice]:
    width = layer.weight.shape[1]
    return [slice(start, min(start + _COLUMNS, width)) for start in range(0, width, _COLUMNS)]


def _evenly(width: int) -> NDArray[np.intp]:
    return np.linspace(0, width - 1, min(width, _SAMPLED_COLUMNS)).astype(np.intp)


def _take(layer: Layer, columns: slice | NDArray[np.intp]) -> Layer:
    return Layer(np.ascontiguousarray(layer.weight[:, columns]), layer.size)


def _energy(values: Float) -> float:
    return float(np.square(values, dtype=np.float64).sum())
