"""Small typed graphs, and workers that misbehave."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

RNG = np.random.default_rng(7)


def weight(name: str, dtype: type[np.generic], *shape: int) -> onnx.TensorProto:
    if np.issubdtype(dtype, np.integer):
        return numpy_helper.from_array(RNG.integers(-100, 100, shape).astype(dtype), name)
    return numpy_helper.from_array((RNG.standard_normal(shape) * 0.1).astype(dtype), name)


def save(
    path: Path, nodes: list[NodeProto], weights: list[onnx.TensorProto], domains: tuple[str, ...] = ()
) -> Path:
    """A graph from `x` (batch x 64) to `y`."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    opsets = [helper.make_opsetid("", 19), *(helper.make_opsetid(domain, 1) for domain in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.fixture
def fp32_model(tmp_path: Path) -> Path:
    """MatMul, Relu, MatMul in FP32."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "w2"], ["y"], "second"),
    ]
    return save(
        tmp_path / "fp32.onnx", nodes, [weight("w1", np.float32, 64, 64), weight("w2", np.float32, 64, 32)]
    )


@pytest.fixture
def fp16_model(tmp_path: Path) -> Path:
    """The same between casts to FP16 and back."""
    nodes = [
        helper.make_node("Cast", ["x"], ["xh"], "down", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["xh", "w1"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "w2"], ["yh"], "second"),
        helper.make_node("Cast", ["yh"], ["y"], "up", to=TensorProto.FLOAT),
    ]
    return save(
        tmp_path / "fp16.onnx", nodes, [weight("w1", np.float16, 64, 64), weight("w2", np.float16, 64, 32)]
    )


@pytest.fixture
def mixed_model(tmp_path: Path) -> Path:
    """First MatMul in INT8 by Q/DQ, the second pinned to FP32."""
    scale = numpy_helper.from_array(np.float32(0.02), "s")
    scales = numpy_helper.from_array(np.full(64, 0.002, np.float32), "sw")
    zero = numpy_helper.from_array(np.int8(0), "z")
    zeros = numpy_helper.from_array(np.zeros(64, np.int8), "zw")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], "x_q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "x_dq"),
        helper.make_node("DequantizeLinear", ["w1", "sw", "zw"], ["wd"], "w1_dq", axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "w2"], ["y"], "second"),
    ]
    weights = [scale, scales, zero, zeros, weight("w1", np.int8, 64, 64), weight("w2", np.float32, 64, 32)]
    return save(tmp_path / "mixed.onnx", nodes, weights)


@pytest.fixture
def refused_model(tmp_path: Path) -> Path:
    """Three operators that no TensorRT knows, and one that it does."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "fine"),
        helper.make_node("Nonsense", ["a"], ["b"], "bad/one", domain="my"),
        helper.make_node("Det", ["a"], ["c"], "bad/two"),
        helper.make_node("Absurd", ["b"], ["y"], "bad/three", domain="my"),
    ]
    return save(tmp_path / "refused.onnx", nodes, [], ("my",))


@pytest.fixture
def fake_worker(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """A worker that runs Python code; `request` holds what it was asked."""

    def make(code: str) -> tuple[str, ...]:
        script = tmp_path / "worker.py"
        script.write_text("import json, os, sys, time\nrequest = json.load(sys.stdin)\n" + code)
        return (sys.executable, str(script))

    return make
