"""Tiny ONNX graphs for the plan's tests, each with what is true of it written beside it."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from diag.model.graph import Model
from diag.model.load import from_proto

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def node(op: str, inputs: str, outputs: str, name: str, **attributes: object) -> NodeProto:
    """A node whose tensor names are given as words."""
    return helper.make_node(op, inputs.split(), outputs.split(), name=name, **attributes)


def model(
    nodes: list[NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: list[str],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 17,
) -> Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("my.ops", 1)]
    return from_proto(helper.make_model(graph, opset_imports=opsets))


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# One pre-norm attention block: RMSNorm spelled out, Q, K and V behind it, softmax, output, residual Add.
ATTENTION_NORM = ("pow", "mean", "eps", "sqrt", "div", "gain")
ATTENTION_QKV = ("q", "k", "v")
ATTENTION_FLOAT = (*ATTENTION_NORM, *ATTENTION_QKV, "kt", "qk", "softmax", "pv", "out_reshape", "out", "res")
ATTENTION_MATMUL = (*ATTENTION_QKV, "qk", "pv", "out")
ATTENTION_WEIGHTED = (*ATTENTION_QKV, "out")
ATTENTION_SHAPE = ("shape", "take", "cat")
ATTENTION_ROLES = {
    **dict.fromkeys(ATTENTION_NORM, "norm"),
    **dict.fromkeys(ATTENTION_QKV, "qkv_proj"),
    "qk": "qk_matmul",
    "softmax": "attn_softmax",
    "pv": "pv_matmul",
    "out": "attn_out_proj",
    "res": "residual_add",
}
ATTENTION_BLOCKS: dict[str, int | None] = dict.fromkeys(ATTENTION_FLOAT, 0)


def attention() -> Model:
    nodes = [
        node("Pow", "x two", "squared", "pow"),
        node("ReduceMean", "squared", "meansq", "mean", axes=[-1]),
        node("Add", "meansq epsilon", "shifted", "eps"),
        node("Sqrt", "shifted", "root", "sqrt"),
        node("Div", "x root", "unit", "div"),
        node("Mul", "unit gamma", "h", "gain"),
        node("MatMul", "h wq", "qt", "q"),
        node("MatMul", "h wk", "ktensor", "k"),
        node("MatMul", "h wv", "vt", "v"),
        node("Transpose", "ktensor", "ktr", "kt", perm=[0, 2, 1]),
        node("MatMul", "qt ktr", "scores", "qk"),
        node("Softmax", "scores", "prob", "softmax", axis=-1),
        node("MatMul", "prob vt", "mixed", "pv"),
        node("Shape", "x", "dims", "shape"),
        node("Gather", "dims zero", "first", "take"),
        node("Concat", "first rest", "target", "cat", axis=0),
        node("Reshape", "mixed target", "flat", "out_reshape"),
        node("MatMul", "flat wo", "attn", "out"),
        node("Add", "attn x", "y", "res"),
    ]
    constants = {
        "two": np.float32(2),
        "epsilon": np.float32(1e-5),
        "gamma": weight(8),
        **{name: weight(8, 8) for name in ("wq", "wk", "wv", "wo")},
        "zero": np.array([0], np.int64),
        "rest": np.array([-1, 8], np.int64),
    }
    return model(nodes, {"x": (FLOAT, ["n", 4, 8])}, ["y"], constants)


def convolutions() -> Model:
    """Three convolutions on one input, two of them of one shape; an Add and a Concat of their outputs."""
    nodes = [
        node("Conv", "x w1", "a", "conv_a", kernel_shape=[1, 1]),
        node("Conv", "x w2", "b", "conv_b", kernel_shape=[1, 1]),
        node("Conv", "x w3", "c", "conv_c", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Add", "a b", "sum", "add"),
        node("Concat", "sum c", "joined", "concat", axis=1),
        node("Relu", "joined", "y", "relu"),
    ]
    constants = {"w1": weight(4, 2, 1, 1), "w2": weight(4, 2, 1, 1), "w3": weight(4, 2, 3, 3)}
    return model(nodes, {"x": (FLOAT, [1, 2, 5, 5])}, ["y"], constants)
