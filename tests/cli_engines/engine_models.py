"""A small model for engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_model(path: Path, *, operator: str = "Relu", domain: str = "") -> Path:
    """MatMul `first`, `operator` `middle`, MatMul `second`: x (batch x 64) to y (batch x 32)."""
    rng = np.random.default_rng(7)
    weights = [
        numpy_helper.from_array((rng.standard_normal(shape) * 0.1).astype(np.float32), name)
        for name, shape in (("w1", (64, 64)), ("w2", (64, 32)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node(operator, ["a"], ["b"], "middle", domain=domain),
        helper.make_node("MatMul", ["b", "w2"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 32])],
        weights,
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path
