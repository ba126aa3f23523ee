"""A small model, and samples for it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def small_model() -> onnx.ModelProto:
    """x (n, 6) -> MatMul -> Relu -> MatMul -> y (n, 4), and z = 2 x."""
    random = np.random.default_rng(0)
    weights = {"w1": random.normal(size=(6, 8)), "w2": random.normal(size=(8, 4)), "two": np.array(2.0)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["h"], name="relu"),
        helper.make_node("MatMul", ["h", "w2"], ["y"], name="second"),
        helper.make_node("Mul", ["x", "two"], ["z"], name="double"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [_declared("x", 6)],
        [_declared("y", 4), _declared("z", 6)],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _declared(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])


def samples(seed: int, number: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(number, 6)).astype(np.float32)
