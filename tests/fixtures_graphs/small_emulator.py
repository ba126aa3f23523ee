"""Runs a small graph node by node with rounding, independent of the product's own emulator."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

CONTRACTIONS = ("MatMul", "Gemm", "Conv")


def fp16(value):
    """Rounded to FP16; what is out of range becomes infinite."""
    return value.astype(np.float16).astype(np.float32) if value.dtype == np.float32 else value


def run_fp16(model, feeds, pinned: Collection[str] = ()):
    """Every tensor by name; each node in FP32, its output rounded to FP16 unless the node is pinned."""
    return _run(
        model, feeds, lambda node, values: values, lambda node, y: y if node.name in pinned else fp16(y), fp16
    )


def run_int8(model, feeds, only: Collection[str]):
    """Every tensor by name; the nodes in `only` read INT8 operands (weights per output channel)."""
    weights = {tensor.name for tensor in model.graph.initializer}

    def operands(node, values):
        if node.name not in only:
            return values
        kinds = {name: 0 if name in weights and node.op_type == "MatMul" else None for name in node.input[:2]}
        return {name: int8(value, kinds[name]) if name in kinds else value for name, value in values.items()}

    return _run(model, feeds, operands, lambda node, y: y, lambda value: value)


def int8(value, axis):
    """Symmetric INT8 over the whole tensor, or for each slice along the other axes than `axis`."""
    scale = np.abs(value).max(axis=axis, keepdims=axis is not None) / 127
    scale = np.where(scale == 0, 1, scale)
    return (np.clip(np.round(value / scale), -127, 127) * scale).astype(np.float32)


def sqnr_db(reference, candidate) -> float:
    """Over finite elements; nan when there is none."""
    kept = np.isfinite(candidate)
    noise = np.square(candidate[kept] - reference[kept]).sum()
    return float(10 * np.log10(np.square(reference[kept]).sum() / noise)) if kept.any() else float("nan")


def _run(model, feeds, operands: Callable, output: Callable, given: Callable):
    with np.errstate(all="ignore"):
        values = {t.name: given(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
        values.update((name, given(value)) for name, value in feeds.items())
        for node in model.graph.node:
            inputs = operands(node, {name: values[name] for name in node.input if name})
            for name, value in zip(node.output, _one(model, node, inputs), strict=True):
                values[name] = output(node, np.asarray(value))
    return values


def _one(model, node, inputs):
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    graph = helper.make_graph(
        [node], "one", typed, [helper.make_empty_tensor_value_info(n) for n in node.output]
    )
    single = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    return ReferenceEvaluator(single).run(None, inputs)
