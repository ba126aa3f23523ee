"""Which inputs of a layer a quantizer goes on, and along which axis weights have channels.

The rules are TensorRT's explicit quantization rules: activations per tensor, weights per output channel
(Conv axis 0, ConvTranspose axis 1, MatMul and Gemm by the output column, or row where the weight is on the
left). A layer is quantized with all its operands or not at all: one alone costs accuracy and no kernel of
TensorRT's uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from diag.model.graph import LINEAR_OPS, MATRIX_OPS, Layer, Model, TensorInfo

_FOLDABLE = frozenset({"Identity", "Transpose", "Reshape", "Cast"})
REARRANGES = frozenset({"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that hand values on unchanged."""


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
    linear operators (biases among them) are left alone, as TensorRT adds them in higher precision. So are
    operands that the model itself brings quantized.
    """
    found: list[Operand] = []
    for layer in model.layers:
        if layer.id in formats:
            found.extend(_operands(model, layer, types) or ())
    return tuple(found)


def operand_notes(model: Model, formats: Mapping[str, str], types: Mapping[str, TensorInfo]) -> list[str]:
    """Sentences on the layers among `formats` that get no quantizer although they were asked for one."""
    bring: list[str] = []
    cannot: list[str] = []
    for layer in model.layers:
        if layer.id in formats and not _operands(model, layer, types):
            (bring if brings_quantizers(model, layer) else cannot).append(layer.id)
    notes = []
    if bring:
        notes.append(f"{len(bring)} layer(s) keep the quantizers that the model brings, first {bring[0]}")
    if cannot:
        notes.append(
            f"{len(cannot)} layer(s) are not quantized: an operand is neither a float activation nor a float "
            f"constant of two or more dimensions, first {cannot[0]}"
        )
    return notes


def brings_quantizers(model: Model, layer: Layer) -> bool:
    """Whether the model itself quantizes every operand of the layer."""
    names = [layer.inputs[i] for i in _candidates(layer) if layer.inputs[i]]
    return bool(names) and all(_comes_quantized(model, name) for name in names)


def _candidates(layer: Layer) -> range:
    return range(2) if layer.op_type in LINEAR_OPS else range(len(layer.inputs))


def _operands(model: Model, layer: Layer, types: Mapping[str, TensorInfo]) -> list[Operand] | None:
    """Operands that get a quantizer; None when the layer cannot be quantized."""
    found = []
    linear = layer.op_type in LINEAR_OPS
    for index in _candidates(layer):
        name = layer.inputs[index]
        if not name or _comes_quantized(model, name):
            continue
        operand = _operand(model, layer, index, types)
        if operand is not None:
            found.append(operand)
        elif linear:
            return None
    return found


def _operand(model: Model, layer: Layer, index: int, types: Mapping[str, TensorInfo]) -> Operand | None:
    name = layer.inputs[index]
    if name in model.value_dependent:
        is_float = name in types and types[name].elem_type == TensorProto.FLOAT
        return Operand(layer.id, index, name, None, None) if is_float else None
    if layer.op_type not in LINEAR_OPS or (index == 0 and layer.op_type not in MATRIX_OPS):
        return None
    weight = constant_value(model, name)
    if weight is None or weight.dtype != np.float32 or weight.ndim < 2:
        return None
    return Operand(layer.id, index, name, weight, weight_axis(layer, index, weight.ndim))


def weight_axis(layer: Layer, index: int, rank: int) -> int:
    """Output-channel axis of a linear layer's weight at input `index`."""
    if layer.op_type == "Conv":
        return 0
    if layer.op_type == "ConvTranspose":
        return 1
    across = rank - 1 if index == 1 else rank - 2
    flag = "transB" if index == 1 else "transA"
    return 1 - across if layer.op_type == "Gemm" and layer.attributes.get(flag, 0) else across


def _comes_quantized(model: Model, name: str) -> bool:
    """Whether the tensor is a DequantizeLinear's, handed on unchanged."""
    producer = model.producers.get(name)
    while producer is not None and producer.op_type in REARRANGES and not producer.domain:
        producer = model.producers.get(producer.inputs[0])
    return producer is not None and producer.op_type == "DequantizeLinear"


def constant_value(model: Model, name: str) -> NDArray[np.generic] | None:
    """Value of a constant, seen through Identity, Transpose, Reshape and Cast to FP32; None when it is
    computed otherwise.
    """
    value = model.constant(name)
    if value is not None:
        return value
    producer = model.producers.get(name)
    if producer is None or producer.op_type not in _FOLDABLE or producer.domain:
        return None
    inner = constant_value(model, producer.inputs[0])
    return None if inner is None else _folded(model, producer, inner)


def _folded(model: Model, layer: Layer, value: NDArray[np.generic]) -> NDArray[np.generic] | None:
    if layer.op_type == "Transpose":
        order = layer.attributes.get("perm")
        return np.transpose(value, order if isinstance(order, list) else None)
    if layer.op_type == "Cast":
        return value.astype(np.float32) if layer.attributes.get("to") == TensorProto.FLOAT else None
    if layer.op_type == "Reshape":
        target = model.constant(layer.inputs[1])
        if target is None or layer.attributes.get("allowzero", 0):
            return None
        shape = [value.shape[i] if size == 0 else int(size) for i, size in enumerate(target.tolist())]
        return value.reshape(shape)
    return value
