"""Whether biases fit the integers that INT8 kernels add them in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from diag.model.graph import LINEAR_OPS, Layer, Model
from diag.typed.brought import Quantizer, dequantized, find_quantizers, quantizer_of

INT32_MAX = 2**31 - 1
_INTEGERS = ("INT8", "UINT8")


def bias_ratios(model: Model) -> Mapping[str, float]:
    """For each INT8 layer with a bias, the largest |bias| / (activation step * weight step) of its channels.

    A kernel that adds the bias to its INT32 sums needs at most 2^31 - 1 (microsoft/onnxruntime#21000: beyond
    it the channel is wrong in silence). The bias is the layer's own input, or a constant that a following Add
    brings; it may be stored as codes.
    """
    by_output = {q.output: q for q in find_quantizers(model)}
    found = {}
    for layer in model.layers:
        steps = _steps(model, by_output, layer)
        bias = None if steps is None else _bias(model, by_output, layer)
        if steps is None or bias is None or (bias.size % steps.size and steps.size % bias.size):
            continue
        channels = bias.reshape(-1, steps.size) if bias.size >= steps.size else bias  # groups share steps
        found[layer.id] = float(np.max(np.abs(channels) / steps))
    return found


def _steps(model: Model, by_output: Mapping[str, Quantizer], layer: Layer) -> NDArray[np.float64] | None:
    """Product of the steps of both operands, by output channel; None when the layer is not in INT8."""
    if layer.op_type not in LINEAR_OPS or layer.domain:
        return None
    product = np.ones(1)
    for name in layer.inputs[:2]:
        quantizer = quantizer_of(model, by_output, name)
        if quantizer is None or quantizer.code_name not in _INTEGERS or quantizer.block_size:
            return None
        scale = quantizer.scale
        if scale is None or not (scale > 0).all() or (product.size > 1 and scale.size > 1):
            return None  # these have rules of their own
        product = product * scale.astype(np.float64).reshape(-1)
    return product


def _bias(model: Model, by_output: Mapping[str, Quantizer], layer: Layer) -> NDArray[np.float64] | None:
    value = None
    if len(layer.inputs) > 2 and layer.inputs[2]:
        value = _value(model, by_output, layer.inputs[2])
    readers = model.consumers.get(layer.outputs[0], ())
    if value is None and len(readers) == 1 and readers[0].op_type == "Add":
        constants = [_value(model, by_output, name) for name in readers[0].inputs]
        value = next((found for found in constants if found is not None), None)
    if value is None or not value.size:
        return None
    return np.asarray(value).astype(np.float64).reshape(-1) * _factor(layer, "beta") / _factor(layer, "alpha")


def _value(model: Model, by_output: Mapping[str, Quantizer], name: str) -> NDArray[np.generic] | None:
    """A constant, before its quantizer where it has one, or from its codes."""
    quantizer = by_output.get(name)
    if quantizer is None or quantizer.kind != "stored":
        return model.constant(name if quantizer is None else quantizer.source)
    codes = model.constant(quantizer.source)
    if codes is None or quantizer.scale is None or quantizer.zero_point is None:
        return None
    return dequantized(codes, quantizer)


def _factor(layer: Layer, name: str) -> float:
    return float(str(layer.attributes.get(name, 1.0))) if layer.op_type == "Gemm" else 1.0
