"""Corners of the rewrite: constants, subgraphs, outputs that are read, casts, names, opsets."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import AttributeProto, helper, numpy_helper
from typed_tools import BFLOAT, BOOL, FLOAT, HALF, INT64, apply_as, graph, node, normal, whole

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.typed.apply import TypedModel, apply_formats, check
from diag.typed.passes.raise_opset import raise_opset

X = {"x": (FLOAT, ["n", 4])}


def run(model: Model, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    return Session(model.proto, model.weights).run(feeds)


def emulated(typed: TypedModel, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """Rounded at every tensor; ONNX Runtime itself would drop a cast to FP16 and back."""
    emulation = emulate(typed.model)
    return Session(emulation.proto, emulation.weights).run(feeds)


# Constants.

LOWEST = -3.4028234663852886e38


@pytest.mark.parametrize(
    ("fmt", "policy", "value", "expected"),
    [
        ("fp16", "clamp", LOWEST, -65504.0),
        ("fp16", "inf", LOWEST, -np.inf),
        ("fp16", "clamp", 65504.0, 65504.0),
        ("fp16", "inf", 65519.9, 65504.0),  # rounds down
        ("fp16", "inf", 65520.0, np.inf),  # the tie goes to even, which is infinity
        ("fp16", "clamp", 65520.0, 65504.0),
        ("fp16", "clamp", -np.inf, -np.inf),  # an infinity is meant
        ("fp16", "clamp", 1e-12, 0.0),
        ("fp16", "clamp", 6e-8, 2.0**-24),
        ("fp16", "clamp", 1 - 1e-6, 1.0),
        ("bf16", "inf", LOWEST, -np.inf),  # beyond BF16's largest, 3.3895e38
        ("bf16", "clamp", LOWEST, -3.3895313892515355e38),
        ("bf16", "clamp", 257.0, 256.0),
    ],
)
def test_constants_beyond_the_range(fmt: str, policy: Any, value: float, expected: float) -> None:
    model = graph([node("Add", "x c", "y", "add")], X, constants={"c": np.full(4, value, np.float32)})
    case = apply_as(model, {"add": fmt}, out_of_range=policy)
    found = case.constants["c"]
    assert found.dtype == (np.float16 if fmt == "fp16" else ml_dtypes.bfloat16)
    assert found.astype(np.float64).tolist() == [expected] * 4


def test_nan_constants_stay() -> None:
    model = graph(
        [node("Add", "x c", "y", "add")], X, constants={"c": np.array([np.nan, 1, 2, 3], np.float32)}
    )
    assert np.isnan(apply_as(model, {"add": "fp16"}).constants["c"][0])


def test_a_constant_in_two_formats_is_converted_once_for_each() -> None:
    nodes = [node("Add", "x c", f"y{i}", f"add{i}") for i in range(5)]
    model = graph(nodes, X, {f"y{i}": FLOAT for i in range(5)}, {"c": normal(4)})
    formats = {"add0": "fp16", "add1": "fp16", "add2": "bf16", "add3": "bf16"}
    case = apply_as(model, formats)
    assert sorted(n for n in case.constants) == ["c", "c/bf16", "c/fp16"]
    assert case.node["add0"].input[1] == case.node["add1"].input[1] == "c/fp16"
    assert case.node["add2"].input[1] == case.node["add3"].input[1] == "c/bf16"
    assert case.node["add4"].input[1] == "c"


def test_large_constants_stay_beside_the_graph() -> None:
    model = graph([node("MatMul", "x w", "y", "op")], X, constants={"w": normal(4, 4000)})
    case = apply_as(model, {"op": "fp16"})
    assert case.typed.weights["w"].dtype == np.float16
    assert len(case.typed.proto.SerializeToString()) < 2000


@pytest.mark.parametrize("form", ["value", "value_float", "value_floats"])
@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_constant_nodes(form: str, fmt: str) -> None:
    value = {
        "value": numpy_helper.from_array(np.float32([3.3]), "t"),
        "value_float": 3.3,
        "value_floats": [3.3],
    }[form]
    nodes = [node("Constant", "", "c", "const", **{form: value}), node("Add", "x c", "y", "add")]
    case = apply_as(graph(nodes, X), {"add": fmt})
    value = np.float16(3.3) if fmt == "fp16" else np.float32(3.3)
    assert case.constants["c"].shape == (() if form == "value_float" else (1,))
    assert np.array_equal(case.constants["c"].reshape(-1), [value])


def test_a_constant_node_that_is_an_output_stays() -> None:
    nodes = [
        node("Constant", "", "c", "const", value_floats=[1.0, 2.0, 3.0, 4.1]),
        node("Add", "x c", "y", "add"),
    ]
    case = apply_as(graph(nodes, X, {"y": FLOAT, "c": FLOAT}), {"add": "fp16"})
    values = emulated(case.typed, {"x": np.zeros((1, 4), np.float32)})
    assert values["c"].tolist() == np.float32([1, 2, 3, 4.1]).tolist()
    assert values["y"].tolist() == [np.float16([1, 2, 3, 4.1]).tolist()]


def test_an_initializer_that_is_an_output_stays() -> None:
    model = graph([node("Add", "x c", "y", "add")], X, {"y": FLOAT, "c": FLOAT}, {"c": normal(4)})
    case = apply_as(model, {"add": "fp16"})
    assert np.array_equal(case.constants["c"], normal(4))
    assert case.elem_types["c"] == FLOAT


def test_other_constants_are_not_touched() -> None:
    nodes = [
        node("Identity", "ints", "e", "same"),
        node("Where", "keep x c", "y", "where"),
    ]
    constants = {"ints": np.array([1, 70000]), "keep": np.array([True, False, True, False]), "c": normal(4)}
    case = apply_as(graph(nodes, X, {"y": FLOAT, "e": INT64}, constants), {"where": "fp16"})
    assert case.constants["ints"].tolist() == [1, 70000]
    assert case.constants["keep"].dtype == bool


def test_empty_lists_in_attributes_survive() -> None:
    """Torch writes a scalar's shape as a Constant whose list is empty."""
    scalar = node("Constant", "", "shape", "const")
    scalar.attribute.add(name="value_ints", type=AttributeProto.INTS)
    model = graph([scalar, node("Reshape", "x shape", "y", "reshape")], {"x": (FLOAT, [1])})
    case = apply_as(model, {"reshape": "fp16"})
    assert case.node["const"].attribute == scalar.attribute
    assert emulated(case.typed, {"x": np.float32([0.1])})["y"].tolist() == float(np.float16(0.1))


def test_pow_takes_its_exponent_along() -> None:
    nodes = [node("Pow", "x two", "s", "pow"), node("Pow", "s k", "y", "pow_int")]
    constants = {"two": np.float32(2), "k": np.array(3, np.int64)}
    case = apply_as(graph(nodes, X, constants=constants), {"pow": "fp16", "pow_int": "fp16"})
    assert case.constants["two"].dtype == np.float16
    assert case.constants["k"].dtype == np.int64
    assert case.elem_types["s"] == HALF


def test_resize_keeps_its_scales_in_fp32() -> None:
    nodes = [node("Resize", "x - scales", "y", "resize", mode="nearest")]
    model = graph(nodes, {"x": (FLOAT, [1, 1, 4, 4])}, constants={"scales": np.float32([1, 1, 1.7, 2])})
    case = apply_as(model, {"resize": "fp16"})
    assert case.constants["scales"].dtype == np.float32
    assert case.elem_types[case.node["resize"].input[0]] == HALF


# What an operator cannot do.


def test_an_operator_without_the_format_is_noted_and_computes_in_fp32() -> None:
    nodes = [node("Relu", "x", "r", "relu"), node("Celu", "r", "d", "celu"), node("Mul", "r d", "y", "mul")]
    case = apply_as(graph(nodes, X), {"relu": "bf16", "celu": "bf16", "mul": "bf16"})
    assert case.typed.formats == {"relu": "bf16", "celu": "fp32", "mul": "bf16"}
    assert case.typed.notes == ("1 Celu layer(s) stay FP32: ONNX defines no bf16 for Celu",)
    assert case.elem_types["d"] == FLOAT


def test_norms_lower_their_output_and_not_their_statistics() -> None:
    """LayerNormalization's mean has a type of its own, which stash_type names; FP16 is not allowed."""
    nodes = [node("LayerNormalization", "x g", "y mean", "norm")]
    model = graph(nodes, X, {"y": FLOAT, "mean": FLOAT}, {"g": normal(4)})
    for fmt, elem_type in (("fp16", HALF), ("bf16", BFLOAT)):
        case = apply_as(model, {"norm": fmt})
        assert case.typed.formats["norm"] == fmt
        assert case.elem_types[case.node["norm"].output[0]] == elem_type
        assert case.node["norm"].output[1] == "mean"
        assert case.elem_types["mean"] == FLOAT


def test_random_numbers_and_index_operators_keep_their_types() -> None:
    nodes = [
        node("Shape", "x", "s", "shape"),
        node("ConstantOfShape", "s", "zeros", "fill"),
        node("Add", "x zeros", "a", "add"),
        node("TopK", "a k", "top where", "topk"),
        node("ArgMax", "a", "best", "argmax", axis=1),
        node("GatherElements", "a where", "y", "gather", axis=1),
    ]
    model = graph(nodes, X, {"y": FLOAT, "best": INT64, "top": FLOAT}, {"k": np.array([2])})
    case = apply_as(model, {n.name: "fp16" for n in nodes})
    assert case.elem_types["zeros"] == FLOAT
    assert case.elem_types["best"] == case.elem_types["where"] == case.elem_types["s"] == INT64
    assert case.elem_types[case.node["gather"].output[0]] == HALF
    x = np.float32([[1, 4, 2, 3]])
    assert emulated(case.typed, {"x": x})["best"].tolist() == [[1]]


def test_all_outputs_of_a_split_follow() -> None:
    nodes = [node("Split", "x", "a b c d", "split", axis=1), node("Concat", "d c b a", "y", "cat", axis=1)]
    case = apply_as(graph(nodes, X, opset=13), {"split": "fp16", "cat": "fp16"})
    assert [case.elem_types[name] for name in "abcd"] == [HALF] * 4
    assert [n.op_type for n in case.typed.proto.graph.node] == ["Cast", "Split", "Concat", "Cast"]


# Casts.


def test_the_users_casts_keep_their_meaning() -> None:
    nodes = [
        node("Cast", "ids", "f", "to_float", to=FLOAT),
        node("Mul", "f x", "m", "mul"),
        node("Cast", "m", "i", "to_int", to=INT64),
        node("Cast", "m", "w", "to_float_again", to=FLOAT),
        node("Cast", "i", "y", "back", to=FLOAT),
    ]
    model = graph(nodes, {**X, "ids": (INT64, ["n", 4])}, {"y": FLOAT, "w": FLOAT})
    case = apply_as(model, dict.fromkeys(("to_float", "mul", "to_int", "to_float_again"), "fp16"))
    assert case.node["to_float"].attribute[0].i == HALF  # one rounding, not two
    assert case.node["to_int"].attribute[0].i == INT64
    assert case.node["back"].attribute[0].i == FLOAT
    feeds = {"x": np.float32([[1, 2, 3, 0.1]]), "ids": np.array([[3, 3, 3, 3]])}
    expected = (np.float16([3, 3, 3, 3]) * np.float16([1, 2, 3, 0.1])).astype(np.float32)
    values = emulated(case.typed, feeds)
    assert values["w"].tolist() == [expected.tolist()]
    assert values["y"].tolist() == [np.trunc(expected).tolist()]


@pytest.mark.parametrize("elem_type", [FLOAT, INT64])
def test_cast_like(elem_type: int) -> None:
    nodes = [node("Relu", "x", "r", "relu"), node("CastLike", "r t", "y", "like")]
    model = graph(nodes, {**X, "t": (elem_type, [1])}, {"y": elem_type})
    case = apply_as(model, {"relu": "fp16", "like": "fp16"})
    target = np.zeros(1, np.float32 if elem_type == FLOAT else np.int64)
    assert emulated(case.typed, {"x": np.float32([[-1, 2, 3, 5000]]), "t": target})["y"].tolist() == [
        [0, 2, 3, 5000]
    ]


def test_the_shape_of_a_lowered_tensor_is_asked_as_it_is() -> None:
    nodes = [
        node("Relu", "x", "r", "relu"),
        node("Shape", "r", "s", "shape"),
        node("Size", "r", "n", "size"),
        node("Reshape", "r s", "y", "reshape"),
    ]
    case = apply_as(graph(nodes, X, {"y": FLOAT, "n": INT64}), {"relu": "fp16", "reshape": "fp16"})
    assert case.node["shape"].input[0] == case.node["size"].input[0] == "r"
    assert [n.op_type for n in case.typed.proto.graph.node].count("Cast") == 2


def test_formats_change_by_a_direct_cast() -> None:
    nodes = [
        node("Relu", "x", "a", "first"),
        node("Neg", "a", "b", "second"),
        node("Relu", "b", "y", "third"),
    ]
    case = apply_as(graph(nodes, X), {"first": "fp16", "second": "bf16"})
    kinds = [(n.op_type, n.attribute[0].i if n.op_type == "Cast" else 0) for n in case.typed.proto.graph.node]
    assert kinds == [
        ("Cast", HALF),
        ("Relu", 0),
        ("Cast", BFLOAT),
        ("Neg", 0),
        ("Cast", FLOAT),
        ("Relu", 0),
    ]


# Outputs.


@pytest.mark.parametrize("reader", ["fp16", "bf16", "fp32"])
def test_an_output_that_is_read_inside(reader: str) -> None:
    nodes = [
        node("Relu", "x", "mid", "first"),
        node("Neg", "mid", "y", "second"),
        node("Abs", "mid", "z", "third"),
    ]
    model = graph(nodes, X, {"mid": FLOAT, "y": FLOAT, "z": FLOAT})
    case = apply_as(model, {"first": "fp16", "second": reader})
    x = np.float32([[0.1, -1, 3.3, 7]])
    values = emulated(case.typed, {"x": x}) if reader != "bf16" else None
    assert [v.name for v in case.typed.proto.graph.output] == ["mid", "y", "z"]
    assert {case.elem_types[name] for name in ("mid", "y", "z")} == {FLOAT}
    casts = [(n.input[0], n.attribute[0].i) for n in case.typed.proto.graph.node if n.op_type == "Cast"]
    assert len(casts) == len(set(casts)) == {"fp16": 3, "fp32": 2, "bf16": 4}[reader]
    if values is not None:
        rounded = x.astype(np.float16).astype(np.float32) * (x > 0)
        assert np.array_equal(values["mid"], rounded)
        assert np.array_equal(values["z"], rounded)
        assert np.array_equal(values["y"], -rounded)


def test_an_input_that_is_an_output() -> None:
    model = graph([node("Relu", "x", "y", "relu")], X, {"x": FLOAT, "y": FLOAT})
    case = apply_as(model, {"relu": "fp16"})
    x = np.float32([[0.1, 0.2, 0.3, 0.4]])
    values = emulated(case.typed, {"x": x})
    assert np.array_equal(values["x"], x)
    assert np.array_equal(values["y"], x.astype(np.float16))


def test_outputs_without_a_shape_are_allowed() -> None:
    proto = graph([node("Relu", "x", "y", "relu")], X).proto
    assert not proto.graph.output[0].type.tensor_type.HasField("shape")
    assert apply_as(from_proto(proto), {"relu": "fp16"}).typed.proto.graph.output == proto.graph.output


# Subgraphs.


def branching(op: str, opset: int = 17) -> Model:
    """x -> scale -> If / Loop that reads `s` and the constant `c` from outside -> y."""
    nodes = [node("Mul", "x c", "s", "scale")]
    value = helper.make_tensor_value_info
    if op == "If":
        then = helper.make_graph(
            [node("Add", "s c", "t", "inner_add")], "then", [], [value("t", FLOAT, None)]
        )
        other = helper.make_graph(
            [node("Identity", "s", "u", "inner_same")], "other", [], [value("u", FLOAT, None)]
        )
        inner = helper.make_graph(
            [node("If", "flag", "e", "inner_if", then_branch=then, else_branch=other)],
            "outer_else",
            [],
            [value("e", FLOAT, None)],
        )
        nodes.append(node("If", "flag", "b", "branch", then_branch=then, else_branch=inner))
    else:
        body = helper.make_graph(
            [
                node("Add", "state s", "next", "inner_add"),
                node("Identity", "go", "still", "inner_go"),
            ],
            "body",
            [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, None)],
            [value("still", BOOL, []), value("next", FLOAT, None)],
        )
        nodes.append(node("Loop", "three flag s", "b", "branch", body=body))
    for inner in [a.g for a in nodes[-1].attribute if a.HasField("g")]:
        for n in inner.node:
            n.metadata_props.add(key="namespace", value="inside")
    nodes.append(node("Relu", "b", "y", "relu"))
    inputs = {**X, "flag": (BOOL, [])}
    return graph(nodes, inputs, constants={"c": normal(4), "three": np.array(3)}, opset=opset)


@pytest.mark.parametrize("op", ["If", "Loop"])
@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_branches_read_fp32(op: str, opset: int, fmt: str) -> None:
    """Branches are not rewritten: what they read from outside is cast back to FP32 before them."""
    model = branching(op, opset)
    case = apply_as(model, {"scale": fmt, "relu": fmt})
    branch = case.node["branch"]
    inner = [n for a in branch.attribute if a.HasField("g") for n in a.g.node]
    assert [p.value for n in inner for p in n.metadata_props] == ["inside"] * len(inner)
    assert case.elem_types["s"] == (HALF if fmt == "fp16" else BFLOAT)
    if fmt == "fp16":
        x = normal(3, 4, seed=2)
        c = normal(4).astype(np.float16).astype(np.float32)
        s = (x.astype(np.float16).astype(np.float32) * c).astype(np.float16).astype(np.float32)
        for flag in (True, False):
            expected = s + normal(4) if flag else s
            if op == "Loop":
                expected = s * 4 if flag else s
            found = emulated(case.typed, {"x": x, "flag": np.array(flag)})["y"]
            assert np.array_equal(found, np.maximum(expected, 0).astype(np.float16).astype(np.float32))


def test_a_constant_that_a_branch_hands_out() -> None:
    value = helper.make_tensor_value_info
    then = helper.make_graph([node("Identity", "c", "t", "inner")], "then", [], [value("t", FLOAT, None)])
    other = helper.make_graph([node("Abs", "c", "u", "inner_abs")], "other", [], [value("u", FLOAT, None)])
    nodes = [
        node("Constant", "", "c", "const", value_floats=[1.0, 2.0, 3.0, 4.1]),
        node("If", "flag", "b", "branch", then_branch=then, else_branch=other),
        node("Add", "b c", "a", "add"),
        node("Add", "a x", "y", "add2"),
    ]
    case = apply_as(graph(nodes, {**X, "flag": (BOOL, [])}), {"add": "fp16", "add2": "fp16"})
    for flag in (True, False):
        values = emulated(case.typed, {"x": np.zeros((1, 4), np.float32), "flag": np.array(flag)})
        assert values["y"].tolist() == [(np.float16([1, 2, 3, 4.1]) * 2).tolist()]


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_a_large_weight_that_only_a_branch_reads(fmt: str) -> None:
    value = helper.make_tensor_value_info
    then = helper.make_graph([node("MatMul", "r w", "t", "inner")], "then", [], [value("t", FLOAT, None)])
    nested = helper.make_graph(
        [node("If", "flag", "e", "inner_if", then_branch=then, else_branch=then)],
        "nested",
        [],
        [value("e", FLOAT, None)],
    )
    nodes = [
        node("Relu", "x", "r", "relu"),
        node("If", "flag", "b", "branch", then_branch=then, else_branch=nested),
        node("Neg", "b", "y", "neg"),
    ]
    weight = normal(4, 400)
    case = apply_as(
        graph(nodes, {**X, "flag": (BOOL, [])}, constants={"w": weight}), {"relu": fmt, "neg": fmt}
    )
    assert np.array_equal(case.constants["w"], weight)
    x = np.float32([[1, 2, 0, 4]])
    for flag in (True, False):
        values = emulated(case.typed, {"x": x, "flag": np.array(flag)})
        assert np.allclose(values["y"], -(x @ weight), rtol=2e-3, atol=1e-3)


# Names.


def test_names_that_are_taken() -> None:
    """A model that was rewritten before has the very names that a rewrite would give."""
    nodes = [
        node("Cast", "x", "x/fp16", "trtdiag/cast/x/fp16", to=HALF),
        node("Cast", "x/fp16", "w", "widen", to=FLOAT),
        node("Relu", "x", "r", "relu"),
        node("MatMul", "r m", "p", "op"),
        node("Add", "p w", "y", "add"),
        node("Identity", "m/fp16", "other", "same"),
    ]
    constants = {"m": normal(4, 4), "m/fp16": normal(2)}
    model = graph(nodes, X, {"y": FLOAT, "other": FLOAT}, constants)
    for formats in (
        {"relu": "fp16", "op": "fp16", "add": "fp16"},
        {"relu": "fp16", "op": "int8", "add": "fp32"},
    ):
        case = apply_as(model, formats, {"x": normal(2, 4)}, base="fp16")
        names = [n for node_ in case.typed.proto.graph.node for n in node_.output]
        assert len(set(names)) == len(names)
        assert np.array_equal(emulated(case.typed, {"x": normal(2, 4)})["other"], normal(2))


@pytest.mark.parametrize("first", ["fp16", "int8"])
def test_a_typed_model_can_be_rewritten_again(first: str) -> None:
    nodes = [node("MatMul", "x m", "p", "op"), node("Relu", "p", "y", "relu")]
    model = graph(nodes, X, constants={"m": normal(4, 4)})
    feeds = {"x": normal(2, 4)}
    once = apply_as(model, {"op": first, "relu": "fp16"}, feeds, base="fp16")
    again = from_proto(whole(once.typed))
    twice = apply_as(again, {layer.id: "fp16" for layer in again.layers if layer.op_type == "Relu"}, feeds)
    assert np.array_equal(emulated(once.typed, feeds)["y"], emulated(twice.typed, feeds)["y"])


# Opsets.


def old() -> Model:
    """Opset 11 in all its glory: attributes that became inputs, Softmax that flattens."""
    nodes = [
        node("Conv", "x w", "a", "conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "a s b m v", "bn", "norm"),
        node("Clip", "bn zero six", "c", "relu6"),
        node("ReduceMean", "c", "r", "mean", axes=[1], keepdims=1),
        node("ReduceSum", "c", "rs", "sum", axes=[3], keepdims=0),
        node("Unsqueeze", "rs", "u", "unsqueeze", axes=[3]),
        node("Add", "c r", "d", "add"),
        node("Split", "d", "e f", "split", axis=1, split=[2, 4]),
        node("Concat", "f e", "g", "cat", axis=1),
        node("Softmax", "g", "h", "softmax", axis=2),
        node("Mul", "h u", "i", "mul"),
        node("Pad", "i pads", "j", "pad"),
        node("Dropout", "j", "k", "drop", ratio=0.5),
        node("LogSoftmax", "k", "y", "logsoftmax"),
    ]
    constants = {
        "w": normal(6, 3, 3, 3),
        "zero": np.float32(0),
        "six": np.float32(6),
        "pads": np.array([0, 0, 1, 1, 0, 0, 0, 0]),
        **{name: np.abs(normal(6, seed=i)) + 0.5 for i, name in enumerate("sbmv")},
    }
    model = graph(nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, constants=constants, opset=11).proto
    for n in model.graph.node:
        n.metadata_props.add(key="namespace", value=f"model.{n.name}")
    for key, value in (("author", "somebody"), ("stride", "32")):
        model.metadata_props.add(key=key, value=value)
    model.doc_string = "a model"
    return from_proto(model)


@pytest.mark.parametrize("target", [13, 18, 19, 22, 23])
def test_a_newer_opset_changes_no_value_and_no_name(target: int) -> None:
    model = old()
    raised = raise_opset(model.proto, target)
    check(raised)
    assert [(o.domain, o.version) for o in raised.opset_import if not o.domain] == [("", target)]
    named = {n.name: n for n in raised.graph.node}
    assert len(named) == len(raised.graph.node)
    for n in model.proto.graph.node:
        assert named[n.name].metadata_props == n.metadata_props
    assert all(name.startswith("trtdiag/opset/") for name in named.keys() - model.layer_by_id.keys())
    assert raised.metadata_props == model.proto.metadata_props
    assert raised.doc_string == "a model"
    assert raised.graph.input == model.proto.graph.input
    tensors = {name for layer in model.layers for name in layer.outputs}
    assert tensors <= {name for n in raised.graph.node for name in n.output}
    feeds = {"x": normal(2, 3, 8, 8)}
    expected = run(model, feeds)["y"]
    assert np.allclose(Session(raised, model.weights).run(feeds)["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fmt", "base", "opset"),
    [
        ("fp16", "fp32", 11),
        ("bf16", "fp32", 22),
        ("int8", "fp32", 13),
        ("int8", "fp16", 19),
        ("int8", "bf16", 22),
    ],
)
def test_old_models_in_every_format(fmt: str, base: str, opset: int) -> None:
    """The nodes that a conversion adds compute in the format of the layer that they serve."""
    model = old()
    feeds = {"x": normal(2, 3, 8, 8)}
    formats = {layer.id: fmt if fmt != "int8" or layer.op_type == "Conv" else base for layer in model.layers}
    case = apply_as(model, formats, feeds, base=base)
    assert case.typed.proto.opset_import[0].version == opset
    assert not case.typed.notes
    lowered = {"fp16": HALF, "bf16": BFLOAT}.get(base if fmt == "int8" else fmt, FLOAT)
    types = case.elem_types
    for n in case.typed.proto.graph.node:
        if n.op_type in ("Flatten", "Reshape", "Softmax", "LogSoftmax", "Split", "Unsqueeze"):
            assert {types[name] for name in n.output} == {lowered}, n.name
    if lowered != BFLOAT:
        error = emulated(case.typed, feeds)["y"] - run(model, feeds)["y"]
        assert np.abs(error).max() < 0.2


def test_a_newer_opset_reaches_into_branches() -> None:
    value = helper.make_tensor_value_info
    then = helper.make_graph(
        [
            node("ReduceMean", "x", "t", "mean", axes=[1], keepdims=1),
            node("Unsqueeze", "t", "u", "un", axes=[0]),
        ],
        "then",
        [],
        [value("u", FLOAT, None)],
    )
    other = helper.make_graph(
        [node("Unsqueeze", "x", "v", "un", axes=[0])], "other", [], [value("v", FLOAT, None)]
    )
    nodes = [
        node("If", "flag", "b", "branch", then_branch=then, else_branch=other),
        node("Relu", "b", "y", "relu"),
    ]
    model = graph(nodes, {**X, "flag": (BOOL, [])}, opset=11)
    raised = raise_opset(model.proto, 19)
    x = normal(3, 4)
    for flag in (True, False):
        feeds = {"x": x, "flag": np.array(flag)}
        assert np.array_equal(Session(raised, {}).run(feeds)["y"], run(model, feeds)["y"])


def test_a_format_that_is_not_for_a_layer_leaves_it_alone() -> None:
    typed = apply_formats(graph([node("Relu", "x", "y", "relu")], X), {"relu": "int4"})
    assert typed.formats == {"relu": "fp32"}
    (note,) = typed.notes
    assert note == "1 layer(s) are not quantized to INT4: only MatMul and Gemm have blocks, first relu"
