"""Moving quantizers, over random graphs: no bit changes, and none is left behind what only moves values."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from diag.calibration.minmax import measure_ranges
from diag.engines.onnxruntime import Session
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.progress import Silent
from diag.typed.apply import TypedModel, apply_formats, operands_of

MOVES = {"Transpose", "Reshape", "Concat", "MaxPool", "Identity"}
Shape = tuple[int, ...]


class Graph:
    """Grows by what the drawn numbers say."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.shapes: dict[str, Shape] = {"x": (2, 4, 4, 4)}
        self.constants: dict[str, NDArray[np.generic]] = {}
        self.outputs: list[str] = []

    def add(self, op: str, inputs: list[str], shape: Shape, **attributes: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"/{name}", **attributes))
        self.shapes[name] = shape
        return name

    def grow(self, kind: int, pick: int) -> None:
        name = sorted(self.shapes)[pick % len(self.shapes)]
        a, b, c, d = self.shapes[name]
        if kind == 0:
            self.add("Relu", [name], (a, b, c, d))
        elif kind == 1:
            self.add("Transpose", [name], (a, c, d, b), perm=[0, 2, 3, 1])
        elif kind == 2:
            self.constants["turned"] = np.array([0, -1, 2, 2], np.int64)
            if b * c * d % 4 == 0:
                self.add("Reshape", [name, "turned"], (a, b * c * d // 4, 2, 2))
        elif kind == 3:
            like = [other for other in sorted(self.shapes) if self.shapes[other] == (a, b, c, d)]
            self.add("Concat", [name, like[pick % len(like)]], (a, 2 * b, c, d), axis=1)
        elif kind == 4 and min(c, d) > 1:
            self.add("MaxPool", [name], (a, b, c // 2, d // 2), kernel_shape=[2, 2], strides=[2, 2])
        elif kind == 5:
            self.add("Identity", [name], (a, b, c, d))
        elif kind == 6:
            self.outputs.append(self.add("Tanh", [name], (a, b, c, d)))
            del self.shapes[self.outputs[-1]]  # its range is another: not to be joined
        else:
            self.product(name)

    def product(self, name: str) -> None:
        shape = self.shapes[name]
        weight = f"w{len(self.nodes)}"
        values = np.random.default_rng(len(self.nodes)).standard_normal((shape[-1], 3))
        self.constants[weight] = values.astype(np.float32)
        made = f"p{len(self.nodes)}"
        self.nodes.append(helper.make_node("MatMul", [name, weight], [made], name=f"/{made}"))
        self.outputs.append(made)

    def model(self) -> Model:
        read = {name for node in self.nodes for name in node.input}
        for name in [name for name in self.shapes if name not in read and name not in self.outputs]:
            self.outputs.append(self.add("Tanh", [name], self.shapes[name]))
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shapes["x"])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        opset = [helper.make_opsetid("", 17)]
        return from_proto(helper.make_model(graph, opset_imports=opset, ir_version=9))


def typed_of(model: Model, feeds: dict[str, NDArray[np.float32]]) -> TypedModel:
    formats = {layer.id: "int8" if layer.op_type == "MatMul" else "fp32" for layer in model.layers}
    operands = operands_of(model, formats, shapes.infer(model), fused=True)
    names = list(dict.fromkeys(o.tensor for o in operands if o.weight is None))
    ranges = measure_ranges(model, names, [feeds], Silent())
    scales = {name: max(found.absmax, 1e-3) / 127 for name, found in ranges.items()}
    return apply_formats(model, formats, scales={"int8": scales}, fused=True)


def left_behind(proto: ModelProto) -> list[str]:
    """Tensors that only move values and that nothing but one activation quantizer reads."""
    readers: dict[str, list[NodeProto]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in proto.graph.output}
    return [
        node.output[0]
        for node in proto.graph.node
        if node.op_type in MOVES
        and node.output[0] not in outputs
        and [n.op_type for n in readers.get(node.output[0], [])] == ["QuantizeLinear"]
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=14))
def test_random_graphs_keep_their_numbers(steps: list[tuple[int, int]]) -> None:
    graph = Graph()
    for kind, pick in steps:
        graph.grow(kind, pick)
    graph.product(sorted(graph.shapes)[-1])
    model = graph.model()
    feeds = {"x": np.random.default_rng(0).standard_normal(graph.shapes["x"]).astype(np.float32) * 3}
    typed = typed_of(model, feeds)
    still, moved = (Session(p, typed.weights).run(feeds) for p in (typed.proto, typed.for_engines))
    assert still.keys() == moved.keys()
    for name, values in still.items():
        np.testing.assert_array_equal(values, moved[name])
    assert left_behind(typed.for_engines) == []
    # a tensor is quantized at most once: what shares an origin shares a scale
    sources = [n.input[0] for n in typed.for_engines.graph.node if n.op_type == "QuantizeLinear"]
    assert len(sources) == len(set(sources))
