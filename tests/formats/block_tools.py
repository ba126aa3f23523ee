"""The block formats by their definitions, block by block in NumPy, and a model to try them on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.model.save import embedded
from diag.typed.apply import TypedModel, apply_formats

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def int4(values: NDArray[np.float32], axis: int, size: int, base: Any = np.float32) -> NDArray[np.float32]:
    """Symmetric: one step of absmax / 7 for each block, kept in the base format; codes -8..7."""

    def block(v: NDArray[np.float32]) -> NDArray[np.float32]:
        step = (
            np.float32(np.abs(v).max() / np.float32(7) if v.any() else 1 / 7).astype(base).astype(np.float32)
        )
        return np.clip(np.rint(v / step), -8, 7) * step

    return by_blocks(values, axis, size, block)


def mxfp8(values: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """OCP MX with E4M3: the smallest power of two that brings a block within 448."""

    def block(v: NDArray[np.float32]) -> NDArray[np.float32]:
        absmax = float(np.abs(v).max())
        scale = np.float32(2.0 ** math.ceil(math.log2(absmax / 448)) if absmax else 1)
        return (v / scale).astype(E4M3).astype(np.float32) * scale

    return by_blocks(values, axis, 32, block)


def nvfp4(values: NDArray[np.float32], axis: int, absmax: float | None = None) -> NDArray[np.float32]:
    """E2M1 elements, an E4M3 scale for 16 of them, one float32 scale: absmax of the tensor / (6 * 448)."""
    absmax = float(np.abs(values).max()) if absmax is None else absmax
    tensor_scale = np.float32(absmax / (6 * 448))

    def block(v: NDArray[np.float32]) -> NDArray[np.float32]:
        wanted = np.abs(v).max() / np.float32(6) / tensor_scale
        scale = np.minimum(wanted, np.float32(448)).astype(E4M3).astype(np.float32) * tensor_scale
        return np.clip(v / scale, -6, 6).astype(E2M1).astype(np.float32) * scale if scale else 0 * v

    return by_blocks(values, axis, 16, block)


def by_blocks(values: NDArray[np.float32], axis: int, size: int, block: Any) -> NDArray[np.float32]:
    moved = np.moveaxis(values, axis, -1)
    result = np.empty_like(moved)
    for index in np.ndindex(moved.shape[:-1]):
        for start in range(0, moved.shape[-1], size):
            result[index][start : start + size] = block(moved[index][start : start + size])
    return np.moveaxis(result, -1, axis)


def product(
    weight: NDArray[np.float32], rows: tuple[int | str, ...] = ("n",), opset: int = 17, **attributes: int
) -> Model:
    """`y = x w`, a MatMul, or a Gemm where attributes are given."""
    depth, width = weight.shape[::-1] if attributes.get("transB") else weight.shape[-2:]
    op_type = "Gemm" if attributes else "MatMul"
    return from_proto(
        helper.make_model(
            helper.make_graph(
                [helper.make_node(op_type, ["x", "w"], ["y"], name="product", **attributes)],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*rows, depth])],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*rows, width])],
                [numpy_helper.from_array(weight, "w")],
            ),
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=9,
        )
    )


def typed(model: Model, fmt: str, x: NDArray[np.float32] | None = None, **options: Any) -> TypedModel:
    """The model with every layer in `fmt`; NVFP4 takes its tensor scale from `x`."""
    scales = {} if x is None else {"nvfp4": {"x": float(np.abs(x).max()) / 6}}
    return apply_formats(model, {layer.id: fmt for layer in model.layers}, scales=scales, **options)


def emulated(model: TypedModel, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    emulation = emulate(Model("typed", model.proto, model.weights, ""))
    return Session(emulation.proto, emulation.weights).run(feed)


def whole(model: TypedModel) -> onnx.ModelProto:
    """With every value inside, as a file has it."""
    return embedded(model.proto, model.weights)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
