"""Small graphs with a place where scale can move, and what is needed to run them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.model.load import load_model

WIDTH, HIDDEN = 16, 32
Array = np.ndarray


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def uniform(seed: int, *shape: int, high: float = 1.0) -> Array:
    return rng(seed).uniform(-high, high, shape).astype(np.float32)


class Graph:
    """Nodes and constants as they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, values: Array) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def linear(self, name: str, source: str, weight: Array) -> str:
        return self.add("MatMul", [source, self.constant(f"{name}/w", weight)], name)

    def saved(self, folder: Path, outputs: list[str], opset: int = 17) -> str:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", WIDTH])
        made = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", "tokens", None]) for n in outputs
        ]
        graph = helper.make_graph(self.nodes, "g", [x], made, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        path = folder / "model.onnx"
        onnx.save(model, path)
        return str(path)


def outlier_gamma(size: float) -> Array:
    gamma = np.ones(WIDTH, np.float32)
    gamma[3] = size
    return gamma


def norm_model(folder: Path, gamma: Array, residual: bool = False, seed: int = 0) -> str:
    """LayerNormalization whose output two projections read, and with `residual` an Add too."""
    g = Graph()
    names = ["x", g.constant("gamma", gamma), g.constant("beta", uniform(seed + 1, WIDTH, high=0.1))]
    g.add("LayerNormalization", names, "norm", axis=-1)
    g.linear("q", "norm", uniform(seed + 2, WIDTH, HIDDEN))
    g.linear("k", "norm", uniform(seed + 3, WIDTH, WIDTH))
    outputs = ["q", "k"]
    if residual:
        outputs[1] = g.add("Add", ["k", "norm"], "sum")
    return g.saved(folder, outputs)


def rms_model(folder: Path, gamma: Array) -> str:
    """RMSNorm spelled out, its gamma a Mul, then Gemm's kind of product with a transposed weight."""
    g = Graph()
    g.add("Mul", ["x", "x"], "square")
    g.add("ReduceMean", ["square"], "mean", axes=[-1], keepdims=1)
    g.add("Add", ["mean", g.constant("eps", np.float32(1e-6))], "shifted")
    g.add("Sqrt", ["shifted"], "root")
    g.add("Div", ["x", "root"], "unit")
    g.add("Mul", [g.constant("gamma", gamma), "unit"], "norm")
    g.linear("y", "norm", uniform(2, WIDTH, HIDDEN))
    return g.saved(folder, ["y"])


def gemm_model(folder: Path, outlier: float = 1.0, residual: bool = False) -> str:
    """Gemm, Relu, Gemm on flat tokens; with `residual` the Relu's output goes out as well."""
    g = Graph()
    shape = g.constant("flat", np.array([-1, WIDTH], np.int64))
    g.add("Reshape", ["x", shape], "rows")
    weight = uniform(1, HIDDEN, WIDTH)
    weight[5] *= outlier
    first = ["rows", g.constant("w1", weight), g.constant("b1", uniform(2, HIDDEN))]
    g.add("Gemm", first, "up", transB=1)
    g.add("Relu", ["up"], "act")
    g.add(
        "Gemm",
        ["act", g.constant("w2", uniform(3, WIDTH, HIDDEN)), g.constant("b2", uniform(4, WIDTH))],
        "down",
        transB=1,
    )
    back = g.constant("back", np.array([1, -1, WIDTH], np.int64))
    g.add("Reshape", ["down", back], "y")
    outputs = ["y"]
    if residual:
        outputs.append(g.add("Unsqueeze", ["act", g.constant("zero", np.array([0], np.int64))], "also"))
    return g.saved(folder, outputs)


def swiglu_model(folder: Path, outlier: float = 1.0) -> str:
    """down(silu(gate(x)) * up(x))."""
    g = Graph()
    up = uniform(1, WIDTH, HIDDEN)
    up[:, 7] *= outlier
    g.linear("gate", "x", uniform(2, WIDTH, HIDDEN))
    g.add("Sigmoid", ["gate"], "sigmoid")
    g.add("Mul", ["gate", "sigmoid"], "silu")
    g.linear("up", "x", up)
    g.add("Mul", ["silu", "up"], "product")
    g.linear("down", "product", uniform(3, HIDDEN, WIDTH))
    return g.saved(folder, ["down"])


def gelu_model(folder: Path, outlier: float = 1.0) -> str:
    """GELU spelled out: its last Mul by one half is a constant that can take a scale."""
    g = Graph()
    up = uniform(1, WIDTH, HIDDEN)
    up[:, 7] *= outlier
    g.linear("up", "x", up)
    g.add("Div", ["up", g.constant("sqrt2", np.float32(np.sqrt(2)))], "scaled")
    g.add("Erf", ["scaled"], "erf")
    g.add("Add", ["erf", g.constant("one", np.float32(1))], "plus")
    g.add("Mul", ["up", "plus"], "times")
    g.add("Mul", ["times", g.constant("half", np.float32(0.5))], "gelu")
    g.linear("down", "gelu", uniform(3, HIDDEN, WIDTH))
    return g.saved(folder, ["down"])


def attention_model(folder: Path, query_heads: int, value_heads: int, outlier: float = 1.0) -> str:
    """Probabilities times V, heads joined, output projection; V's heads are repeated for grouped queries."""
    depth, g = 4, Graph()
    width, shared = query_heads * depth, query_heads // value_heads
    value_weight = uniform(1, WIDTH, value_heads * depth)
    value_weight[:, 1] *= outlier

    def heads(name: str, weight: Array, count: int) -> str:
        g.linear(f"{name}/proj", "x", weight)
        shape = g.constant(f"{name}/shape", np.array([0, 0, count, depth], np.int64))
        g.add("Reshape", [f"{name}/proj", shape], f"{name}/split")
        return g.add("Transpose", [f"{name}/split"], f"{name}/heads", perm=[0, 2, 1, 3])

    g.add("Softmax", [heads("p", uniform(5, WIDTH, width), query_heads)], "first", axis=-1)
    g.add("Transpose", ["first"], "turned", perm=[0, 1, 3, 2])
    g.add("MatMul", ["first", "turned"], "scores")
    g.add("Softmax", ["scores"], "probabilities", axis=-1)
    value = heads("v", value_weight, value_heads)
    if shared > 1:
        g.add("Unsqueeze", [value, g.constant("two", np.array([2], np.int64))], "v/wide")
        target = g.constant("v/target", np.array([1, 1, shared, 1, 1], np.int64))
        g.add("Expand", ["v/wide", target], "v/many")
        value = g.add(
            "Reshape",
            ["v/many", g.constant("v/again", np.array([0, query_heads, -1, depth], np.int64))],
            "v/all",
        )
    g.add("MatMul", ["probabilities", value], "mixed")
    g.add("Transpose", ["mixed"], "back", perm=[0, 2, 1, 3])
    g.add("Reshape", ["back", g.constant("join", np.array([0, 0, width], np.int64))], "joined")
    g.linear("y", "joined", uniform(6, width, WIDTH))
    return g.saved(folder, ["y"])


def data(folder: Path, batches: int = 6, seed: int = 100, high: float = 1.0) -> str:
    """Batches of uniform inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(batches):
        np.savez(folder / f"{number}.npz", x=uniform(seed + number, 2, 24, WIDTH, high=high))
    return str(folder)


def run(model: Model, feed: dict[str, Array]) -> dict[str, Array]:
    return Session(model.proto, model.weights).run(feed)


def outputs_of(path: str, feed: dict[str, Array]) -> dict[str, Array]:
    return run(load_model(path), feed)
