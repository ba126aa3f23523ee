"""An FP32 model as TF32 tensor cores compute it: operands of MatMul, Gemm and Conv with 10 bits of mantissa.

TensorRT multiplies FP32 in TF32 unless told otherwise. ONNX has no such type, but FP32 arithmetic itself can
round to it: with c = 8193 x, the difference c - (c - x) keeps the upper 11 of 24 bits (Veltkamp's split).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from diag.engines.emulation import stub
from diag.model.graph import Model, TensorInfo, captured_names

_SPLITTER = np.float32(2**13 + 1)
_HIGH_BITS = np.uint32(0xFFFFE000)
_HALF_STEP = np.uint32(1 << 12)
_OPS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


def round_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values with 10 bits of mantissa, to nearest, ties away from zero; NaN and infinity stay. Any shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + _HALF_STEP) & _HIGH_BITS).view(np.float32)
    return np.where(np.isfinite(values), rounded, values).astype(np.float32).reshape(values.shape)


def emulate_tf32(model: Model, types: Mapping[str, TensorInfo]) -> Model:
    """The model with both operands of each FP32 multiplying operator rounded; sums stay FP32.

    `types` are those of `model` (see `diag.model.shapes.infer`). Values beyond 2^115 overflow in the split.
    """
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.node[:]
    weights = dict(model.weights)
    rounded: dict[str, str] = {}
    for node in model.proto.graph.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        if node.op_type in _OPS and node.domain in ("", "ai.onnx"):
            for index, name in enumerate(node.input[:2]):
                if _is_fp32(model, types, name):
                    copy.input[index] = _rounded(model, proto, weights, rounded, name)
        proto.graph.node.append(copy)
    _drop_unused(proto, weights)
    return Model(f"{model.path} in TF32", proto, weights, "")


def _drop_unused(proto: ModelProto, weights: dict[str, NDArray[np.generic]]) -> None:
    """Without the weights whose rounded copies took their place; ONNX Runtime refuses values of none."""
    used = {name for node in proto.graph.node for name in (*node.input, *captured_names(node))}
    used |= {value.name for value in proto.graph.output}
    for index in reversed(range(len(proto.graph.initializer))):
        name = proto.graph.initializer[index].name
        if name not in used:
            del proto.graph.initializer[index]
            weights.pop(name, None)


def _is_fp32(model: Model, types: Mapping[str, TensorInfo], name: str) -> bool:
    if name in model.constants:
        return bool(model.constants[name].dtype == np.float32)
    info = types.get(name) or model.inputs.get(name)
    return info is not None and info.elem_type == TensorProto.FLOAT


def _rounded(
    model: Model,
    proto: ModelProto,
    weights: dict[str, NDArray[np.generic]],
    rounded: dict[str, str],
    name: str,
) -> str:
    """Name of the rounded tensor, made where it is first needed."""
    if name in rounded:
        return rounded[name]
    target = rounded[name] = f"{name}/tf32"
    if name in model.constants:
        weights[target] = round_tf32(np.asarray(model.constants[name], np.float32))
        proto.graph.initializer.append(stub(target, weights[target]))
        return target
    if "tf32/splitter" not in rounded:
        rounded["tf32/splitter"] = "tf32/splitter"
        proto.graph.initializer.append(
            helper.make_tensor("tf32/splitter", TensorProto.FLOAT, (), [float(_SPLITTER)])
        )
    for op_type, inputs, output in (
        ("Mul", [name, "tf32/splitter"], f"{target}/wide"),
        ("Sub", [f"{target}/wide", name], f"{target}/low"),
        ("Sub", [f"{target}/wide", f"{target}/low"], target),
    ):
        proto.graph.node.append(helper.make_node(op_type, inputs, [output], output))
    return target
