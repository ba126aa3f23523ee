"""Whether biases fit the integers that INT8 kernels add them in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from diag.model.graph import LINEAR_OPS, Layer, Model

INT32_MAX = 2**31 - 1


def bias_ratios(typed: Model) -> Mapping[str, float]:
    """For each INT8 layer with a bias, the largest |bias| / (activation step * weight step) of its channels.

    A kernel that adds the bias to its INT32 sums needs at most 2^31 - 1 (microsoft/onnxruntime#21000: beyond
    it the channel is wrong in silence). The bias is the layer's own input, or a constant that a following Add
    brings.
    """
    found = {}
    for layer in typed.layers:
        steps = _steps(typed, layer)
        bias = None if steps is None else _bias(typed, layer)
        if steps is None or bias is None or (bias.size % steps.size and steps.size % bias.size):
            continue
        channels = bias.reshape(-1, steps.size) if bias.size >= steps.size else bias  # groups share steps
        found[layer.id] = float(np.max(np.abs(channels) / steps))
    return found


def _steps(typed: Model, layer: Layer) -> NDArray[np.float64] | None:
    """Product of the steps of both operands, by output channel; None when the layer is not in INT8."""
    if layer.op_type not in LINEAR_OPS or layer.domain:
        return None
    product = np.ones(1)
    for name in layer.inputs[:2]:
        source = typed.producers.get(name)
        if source is None or source.op_type != "DequantizeLinear" or len(source.inputs) < 3:
            return None
        scale, zero = (typed.constant(parameter) for parameter in source.inputs[1:3])
        if scale is None or zero is None or zero.dtype != np.int8:
            return None
        product = product * scale.astype(np.float64).reshape(-1)
    return product


def _bias(typed: Model, layer: Layer) -> NDArray[np.float64] | None:
    value = typed.constant(layer.inputs[2]) if len(layer.inputs) > 2 and layer.inputs[2] else None
    readers = typed.consumers.get(layer.outputs[0], ())
    if value is None and len(readers) == 1 and readers[0].op_type == "Add":
        constants = [typed.constant(name) for name in readers[0].inputs]
        value = next((found for found in constants if found is not None), None)
    if value is None or not value.size:
        return None
    return np.asarray(value).astype(np.float64).reshape(-1) * _factor(layer, "beta") / _factor(layer, "alpha")


def _factor(layer: Layer, name: str) -> float:
    return float(str(layer.attributes.get(name, 1.0))) if layer.op_type == "Gemm" else 1.0
