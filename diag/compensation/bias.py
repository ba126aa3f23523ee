"""Bias correction: the mean error of each output channel of a quantized layer, taken off (Nagel et al. 2019).

Empirical correction (arXiv 1906.04721, section 4.2 and appendix) on the FP32 model's own inputs: what a layer
gets wrong on average by rounding its weight and its input. Rounding a channel that hardly varies gives nearly
the same error every time, and pooling over tokens does not average that out: in MiniLM, smoothing the first
FFN-down alone gains 8 dB in the layer, costs the pooled output 9 dB, and gains it 9 dB once corrected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.calibration.best import layer_alone
from diag.calibration.meter import CONVOLUTIONS, Meter
from diag.compensation.draft import Draft
from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.numerics.formats import FORMATS, dequantize, quantize, symmetric_scale
from diag.typed.operands import Operand

Float = NDArray[np.float32]
Batch = Mapping[str, NDArray[np.generic]]


@dataclass
class _Layer:
    """A layer with a constant weight, in FP32 and rounded."""

    tensor: str
    weight: Float
    rounded: Float
    session: Session
    convolution: bool
    total: NDArray[np.float64] | float = 0.0
    count: int = 0

    def observe(self, exact: Float, rounded: Float) -> None:
        """Add up what the layer makes of its input less what it makes of the rounded one, by channel."""
        vectors = 1
        if not self.convolution:  # linear in its input: the mean of the outputs is the output of the mean
            vectors = exact.size // exact.shape[-1]
            exact, rounded = (
                values.reshape(vectors, -1).mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
                for values in (exact, rounded)
            )
        error = self._run(exact, self.weight) - self._run(rounded, self.rounded)
        channel = 1 if self.convolution else error.ndim - 1
        others = tuple(i for i in range(error.ndim) if i != channel)
        self.total = self.total + error.sum(axis=others, dtype=np.float64) * vectors
        self.count += vectors * error.size // error.shape[channel]

    def _run(self, values: Float, weight: Float) -> Float:
        (output,) = self.session.run({"a": values, "b": weight}).values()
        return np.asarray(output, np.float32)


def find_corrections(
    draft: Draft, operands: Sequence[Operand], fmt: str, batches: Iterable[Batch], layers: frozenset[str]
) -> dict[str, Float]:
    """Mean error to add back, shape (channels,), of each of `layers` that has one constant weight.

    `operands` are the draft's; `batches` are read once, one at a time.
    """
    found = _layers(draft, operands, fmt, layers)
    if not found:
        return {}
    tensors = tuple(dict.fromkeys(layer.tensor for layer in found.values()))
    meter = Meter(draft.model, tensors)
    for batch in batches:
        for name, array in meter.run(batch).values.items():
            exact = np.asarray(array, np.float32)
            scale = symmetric_scale(np.array(draft.limit(name)), FORMATS[fmt])
            rounded = dequantize(quantize(exact, scale, FORMATS[fmt]), scale)
            for layer in found.values():
                if layer.tensor == name:
                    layer.observe(exact, rounded)
    return {name: np.asarray(layer.total / max(layer.count, 1), np.float32) for name, layer in found.items()}


def _layers(draft: Draft, operands: Sequence[Operand], fmt: str, layers: frozenset[str]) -> dict[str, _Layer]:
    by_layer: dict[str, list[Operand]] = {}
    for operand in operands:
        if operand.layer in layers:
            by_layer.setdefault(operand.layer, []).append(operand)
    found = {}
    for name, pair in by_layer.items():
        activation = [o for o in pair if o.weight is None and o.input == 0]
        weight = [o for o in pair if o.weight is not None and o.input == 1]
        if len(pair) == 2 and activation and weight and _supported(draft.model, name):
            found[name] = _layer(draft, name, activation[0], weight[0], fmt)
    return found


def _supported(model: Model, name: str) -> bool:
    """Gemm with a transposed input has its rows on the other axis."""
    layer = model.layer_by_id[name]
    return layer.op_type != "ConvTranspose" and not layer.attributes.get("transA", 0)


def _layer(draft: Draft, name: str, activation: Operand, weight: Operand, fmt: str) -> _Layer:
    assert weight.weight is not None and weight.channel_axis is not None
    values, axis = np.asarray(weight.weight, np.float32), weight.channel_axis
    others = tuple(i for i in range(values.ndim) if i != axis)
    ratio = draft.weight_ratios.get(weight.tensor, np.float32(1))
    scale = symmetric_scale(np.abs(values).max(axis=others) * ratio, FORMATS[fmt])
    rounded = dequantize(quantize(values, scale, FORMATS[fmt], axis), scale, axis)
    node = next(node for node in draft.model.proto.graph.node if node.name == name)
    convolution = node.op_type in CONVOLUTIONS
    return _Layer(activation.tensor, values, rounded, layer_alone(draft.model, node), convolution)
