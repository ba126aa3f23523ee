"""Bias correction: the mean error of each output channel of a quantized layer, taken off (Nagel et al. 2019).

Empirical correction (arXiv 1906.04721, section 4.2 and appendix) on the FP32 model's own inputs: what a
layer gets wrong on average by rounding its weight and its input. Where values hardly vary, rounding gives
nearly the same error every time: in MiniLM, smoothing the first FFN-down alone takes the embedding from 19.4
to 27.8 dB and the positions of padding from 16.7 down to 5.6 dB; corrected, they have 29.6 and 23.9 dB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.calibration.best import layer_alone
from diag.calibration.meter import CONVOLUTIONS, Meter
from diag.compensation.draft import Draft
from diag.compensation.layer_error import rounded_activation, rounded_channels
from diag.engines.onnxruntime import Session
from diag.model.graph import MATRIX_OPS, Model
from diag.typed.operands import Operand

Float = NDArray[np.float32]
Batch = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class _Layer:
    """A layer with a constant weight and one activation."""

    id: str
    tensor: str
    weight: Operand

    def rounded(self, draft: Draft, fmt: str) -> Float:
        """The weight as its codes give it back."""
        axis, ratio = self.weight.channel_axis, draft.weight_ratios.get(self.weight.tensor, 1.0)
        assert axis is not None
        return rounded_channels(self.values, fmt, ratio, axis)

    @property
    def values(self) -> Float:
        return np.asarray(self.weight.weight, np.float32)


@dataclass
class _Mean:
    """Mean vector of an activation, and of what the quantizer passes on of it."""

    exact: NDArray[np.float64] | float = 0.0
    rounded: NDArray[np.float64] | float = 0.0
    vectors: int = 0

    def add(self, exact: Float, rounded: Float) -> None:
        rows = exact.reshape(-1, exact.shape[-1])
        self.exact = self.exact + rows.sum(axis=0, dtype=np.float64)
        self.rounded = self.rounded + rounded.reshape(rows.shape).sum(axis=0, dtype=np.float64)
        self.vectors += len(rows)


@dataclass
class _Convolution:
    """A convolution in FP32 and rounded; borders make its mean another thing than that of its input."""

    weight: Float
    coarse: Float
    session: Session
    total: NDArray[np.float64] | float = 0.0
    pixels: int = 0

    def add(self, exact: Float, rounded: Float) -> None:
        error = self._run(exact, self.weight) - self._run(rounded, self.coarse)
        others = tuple(i for i in range(error.ndim) if i != 1)
        self.total = self.total + error.sum(axis=others, dtype=np.float64)
        self.pixels += error.size // error.shape[1]

    def _run(self, values: Float, weight: Float) -> Float:
        (output,) = self.session.run({"a": values, "b": weight}).values()
        return np.asarray(output, np.float32)


def find_corrections(
    draft: Draft, operands: Sequence[Operand], fmt: str, batches: Iterable[Batch], layers: frozenset[str]
) -> dict[str, Float]:
    """Mean error to add back, shape (channels,), of each of `layers` that has one constant weight.

    `operands` are the draft's; `batches` are read once, one at a time.
    """
    found = _layers(draft, operands, layers)
    if not found:
        return {}
    means, convolutions = _observed(draft, found, fmt, batches)
    corrections = {}
    for layer in found:
        if layer.id in convolutions:
            seen = convolutions[layer.id]
            corrections[layer.id] = np.asarray(seen.total / max(seen.pixels, 1), np.float32)
        else:
            corrections[layer.id] = _of_linear(draft, layer, means[layer.tensor], fmt)
    return corrections


def _observed(
    draft: Draft, layers: Sequence[_Layer], fmt: str, batches: Iterable[Batch]
) -> tuple[dict[str, _Mean], dict[str, _Convolution]]:
    nodes = {node.name: node for node in draft.model.proto.graph.node}
    convolutions = {
        x.id: _Convolution(x.values, x.rounded(draft, fmt), layer_alone(draft.model, nodes[x.id]))
        for x in layers
        if nodes[x.id].op_type in CONVOLUTIONS
    }
    means = {x.tensor: _Mean() for x in layers if x.id not in convolutions}
    meter = Meter(draft.model, tuple(dict.fromkeys(x.tensor for x in layers)))
    for batch in batches:
        for name, array in meter.run(batch).values.items():
            exact = np.asarray(array, np.float32)
            rounded = rounded_activation(exact, fmt, draft.limit(name))
            if name in means:
                means[name].add(exact, rounded)
            for layer in layers:
                if layer.tensor == name and layer.id in convolutions:
                    convolutions[layer.id].add(exact, rounded)
    return means, convolutions


def _of_linear(draft: Draft, layer: _Layer, mean: _Mean, fmt: str) -> Float:
    """A linear layer's mean error is its error on the means."""
    exact, coarse = layer.values.astype(np.float64), layer.rounded(draft, fmt).astype(np.float64)
    if layer.weight.channel_axis == 0:
        exact, coarse = exact.T, coarse.T
    error = (mean.exact @ exact - mean.rounded @ coarse) / max(mean.vectors, 1)
    alpha = draft.model.layer_by_id[layer.id].attributes.get("alpha", 1.0)
    return np.asarray(error * (alpha if isinstance(alpha, float) else 1.0), np.float32)


def _layers(draft: Draft, operands: Sequence[Operand], layers: frozenset[str]) -> list[_Layer]:
    by_layer: dict[str, list[Operand]] = {}
    for operand in operands:
        if operand.layer in layers:
            by_layer.setdefault(operand.layer, []).append(operand)
    found = []
    for name, pair in by_layer.items():
        activation = [o for o in pair if o.weight is None and o.input == 0]
        weight = [o for o in pair if o.weight is not None and o.input == 1]
        if len(pair) == 2 and activation and weight and _supported(draft.model, name, weight[0]):
            found.append(_Layer(name, activation[0].tensor, weight[0]))
    return found


def _supported(model: Model, name: str, weight: Operand) -> bool:
    """Convolutions, and products of rows with a matrix."""
    layer = model.layer_by_id[name]
    if layer.op_type in CONVOLUTIONS:
        return layer.op_type == "Conv"
    matrix = weight.weight is not None and weight.weight.ndim == 2
    return matrix and layer.op_type in MATRIX_OPS and not layer.attributes.get("transA", 0)
