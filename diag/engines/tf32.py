"""An FP32 model as TF32 tensor cores compute it: operands of MatMul, Gemm and Conv with 10 bits of mantissa.

TensorRT multiplies FP32 in TF32 unless told otherwise: this is the whole FP32 model as such an engine has it,
for the question whose an engine's error is. A plan's `tf32` is the same rounding on the layers it names.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from diag.engines.emulation import TF32_SPLITTER, tf32_rounding
from diag.model.graph import LINEAR_OPS, Model, TensorInfo
from diag.model.load import drop_unused, stub
from diag.numerics.formats import round_tf32


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
        if node.op_type in LINEAR_OPS and node.domain in ("", "ai.onnx"):
            for index, name in enumerate(node.input[:2]):
                if _is_fp32(model, types, name):
                    copy.input[index] = _rounded(model, proto, weights, rounded, name)
        proto.graph.node.append(copy)
    drop_unused(proto, weights)  # rounded copies took the place of some
    return Model(f"{model.path} in TF32", proto, weights, "")


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
            helper.make_tensor("tf32/splitter", TensorProto.FLOAT, (), [float(TF32_SPLITTER)])
        )
    proto.graph.node.extend(tf32_rounding(name, target, "tf32/splitter"))
    return target
