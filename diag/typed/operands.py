"""Which inputs of a layer a quantizer goes on, and along which axis weights have channels.

The rules are TensorRT's explicit quantization rules: activations per tensor, weights per output channel
(Conv axis 0, ConvTranspose axis 1, MatMul and Gemm by the output column).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.model.graph import Layer, Model, TensorInfo

LINEAR_OPS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Operators whose operands a quantized default covers."""

_WEIGHT_INPUT = 1
_FOLDABLE = frozenset({"Identity", "Transpose"})


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of a quantized layer."""

    layer: str
    input: int
    tensor: str
    weight: NDArray[np.generic] | None
    """Constant float values, None for an activation."""
    channel_axis: int | None
    """Axis of `weight` with one scale for each index; None for an activation."""


def quantized_operands(
    model: Model, formats: Mapping[str, str], types: Mapping[str, TensorInfo]
) -> tuple[Operand, ...]:
    """Operands of every layer whose format is in `formats`, in graph order.

    `formats` maps layer ids to a quantized format's name. Constant inputs other than the weights of
    linear operators (biases among them) are left alone, as TensorRT adds them in higher precision.
    """
    found: list[Operand] = []
    for layer in model.layers:
        if layer.id in formats:
            found.extend(_operands(model, layer, types))
    return tuple(found)


def _operands(model: Model, layer: Layer, types: Mapping[str, TensorInfo]) -> list[Operand]:
    candidates = range(2) if layer.op_type in LINEAR_OPS else range(len(layer.inputs))
    found = []
    for index in candidates:
        name = layer.inputs[index]
        if name in model.value_dependent:
            if name in types and types[name].is_float:
                found.append(Operand(layer.id, index, name, None, None))
        elif layer.op_type in LINEAR_OPS and index == _WEIGHT_INPUT:
            weight = constant_value(model, name)
            if weight is not None and weight.dtype == np.float32 and weight.ndim >= 2:
                found.append(Operand(layer.id, index, name, weight, weight_axis(layer, weight.ndim)))
    return found


def weight_axis(layer: Layer, rank: int) -> int:
    """Output-channel axis of a linear layer's weight."""
    if layer.op_type == "Conv":
        return 0
    if layer.op_type == "ConvTranspose":
        return 1
    if layer.op_type == "Gemm" and layer.attributes.get("transB", 0):
        return 0
    return rank - 1


def constant_value(model: Model, name: str) -> NDArray[np.generic] | None:
    """Value of a constant, seen through Identity and Transpose nodes; None when it is computed otherwise."""
    value = model.constant(name)
    if value is not None:
        return value
    producer = model.producers.get(name)
    if producer is None or producer.op_type not in _FOLDABLE:
        return None
    inner = constant_value(model, producer.inputs[0])
    if inner is None or producer.op_type == "Identity":
        return inner
    order = producer.attributes.get("perm")
    return np.transpose(inner, order if isinstance(order, list) else None)
