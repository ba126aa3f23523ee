"""The paired graph: accumulated and local error are what they say, whatever the slices and the batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from engine_tools import (
    BOOL,
    FLOAT,
    HALF,
    INT64,
    NARROW,
    Array,
    all_values,
    as_model,
    constants_of,
    elem_types,
    evaluate,
    graph,
    node,
    normal,
    quantize_int8,
    rounded,
    steps_apart,
    typed_model,
    wide,
)
from onnx import helper

from diag.engines.emulation import emulate
from diag.engines.paired import Paired, pair
from diag.engines.slices import Observation, SlicedRun
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.typed.apply import TypedModel
from diag.typed.types import complete
from fixtures.graphs import Dims, GraphFixture, bert, cnn, conformer, detector, gpt2, llama, vit

SMALL = Dims(hidden=16, heads=2, kv_heads=1, ffn=24, blocks=1, vocab=31, seq_len=5)
GRAPHS = {
    **{make.__name__: partial(make, SMALL) for make in (bert, gpt2, llama, vit, conformer)},
    "gpt2-13": partial(gpt2, SMALL, opset=13),
    "cnn": partial(cnn, channels=4, blocks=1, image=8),
    "cnn-11": partial(cnn, channels=4, blocks=1, image=8, opset=11),
    "detector": partial(detector, channels=4, image=16),
    "bert-contrib": partial(bert, SMALL, attention="contrib"),
}
PLANS = ["fp16", "int8", "int8+bf16", "mixed"]

X = {"x": (FLOAT, ["n", 4])}


def planned(fixture: GraphFixture, plan: str) -> tuple[Model, TypedModel, dict[str, Array]]:
    model = from_proto(fixture.model)
    feeds = dict(fixture.batch(2))
    base = plan.partition("+")[2] or "fp32"
    products = [x for x in model.layers if x.op_type in ("MatMul", "Gemm", "Conv")]
    if plan == "mixed":
        rng = np.random.default_rng(2)
        formats = {x.id: str(rng.choice(["fp32", "fp16", "bf16"])) for x in model.layers}
    elif plan.startswith("int8"):
        formats = {x.id: base for x in model.layers} | {x.id: "int8" for x in products}
    else:
        formats = {x.id: plan for x in model.layers}
    values = all_values(model.proto, model.weights, feeds)
    scales = {n: float(np.abs(values[n]).max()) / 127 for x in products for n in x.inputs[:2] if n in values}
    return model, typed_model(model, formats, scales, base=base), feeds


def paired_of(model: Model, typed: TypedModel) -> Paired:
    return pair(model, as_model(typed), complete(shapes.infer(model), model))


def observe(
    paired: Paired, model: Model, feeds: Mapping[str, Array], slice_bytes: int = 1 << 30
) -> dict[str, Observation]:
    run = SlicedRun(paired, shapes.infer(model), slice_bytes)
    return {seen.watch.tensor: seen for part in run.run(feeds) for seen in part}


def same(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("plan", PLANS)
def test_reference_and_accumulated_are_those_of_the_two_models_alone(name: str, plan: str) -> None:
    model, typed, feeds = planned(GRAPHS[name](), plan)
    seen = observe(paired_of(model, typed), model, feeds)
    reference = all_values(model.proto, model.weights, feeds)
    emulation = emulate(as_model(typed))
    alone = all_values(emulation.proto, emulation.weights, feeds)
    assert set(model.outputs) <= seen.keys()
    for tensor, found in seen.items():
        assert same(found.reference, reference[tensor])
        if found.emulated is not None and tensor in alone:
            assert same(found.emulated, alone[tensor]), tensor
        if found.emulated is None:
            assert same(found.reference, alone.get(tensor, reference[tensor])), tensor


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("plan", PLANS)
def test_local_is_the_layer_on_the_references_inputs(name: str, plan: str) -> None:
    model, typed, feeds = planned(GRAPHS[name](), plan)
    paired = paired_of(model, typed)
    seen = observe(paired, model, feeds)
    types = elem_types(typed.proto)
    reference = all_values(model.proto, model.weights, feeds)
    made = {n.name: n for n in typed.proto.graph.node}
    checked = 0
    for watch in paired.watches:
        if not watch.local or watch.source != watch.tensor:
            continue
        layer = made[watch.layer]
        if layer.domain:
            continue  # the reference evaluator knows ONNX's own operators only
        inputs = {n: _received(n, typed, types, reference) for n in layer.input if n}
        index = list(model.layer_by_id[watch.layer].outputs).index(watch.tensor)
        right = evaluate(layer, typed.proto, inputs, types)[index]
        got, elem_type = seen[watch.tensor].local, types.get(layer.output[index], FLOAT)
        assert got is not None
        if elem_type in NARROW:
            assert steps_apart(got, right, elem_type) <= 1, watch.layer
        else:
            peak = np.abs(right).max()
            assert np.allclose(got, right, rtol=2e-5, atol=1e-6 * peak), watch.layer
        checked += 1
    assert checked > 3


def _received(
    name: str, typed: TypedModel, types: Mapping[str, int], reference: Mapping[str, Array]
) -> Array:
    """The reference's tensor as the typed layer receives it: through its casts, quantizers and constants."""
    constants = constants_of(typed)
    if name in constants:
        return wide(constants[name])
    if name in reference:
        return rounded(reference[name], types.get(name, 0))
    n = next(n for n in typed.proto.graph.node if name in n.output)
    values = {i: _received(i, typed, types, reference) for i in n.input if i}
    return evaluate(n, typed.proto, values, types)[list(n.output).index(name)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("plan", ["fp16", "int8+fp16", "mixed"])
def test_slices_of_any_size_give_the_same_numbers(name: str, plan: str) -> None:
    model, typed, feeds = planned(GRAPHS[name](), plan)
    paired = paired_of(model, typed)
    whole = observe(paired, model, feeds)
    assert SlicedRun(paired, shapes.infer(model), 1 << 30).count == 1
    for slice_bytes in (1, 3000):
        run = SlicedRun(paired, shapes.infer(model), slice_bytes)
        assert run.count > 1
        cut = {seen.watch.tensor: seen for part in run.run(feeds) for seen in part}
        assert list(cut) == list(whole)
        for tensor, seen in cut.items():
            assert same(seen.reference, whole[tensor].reference)
            assert same(seen.emulated, whole[tensor].emulated)
            assert same(seen.local, whole[tensor].local)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "conformer", "vit"])
def test_batches_of_any_shape_run_through_one_set_of_sessions(name: str) -> None:
    fixture = GRAPHS[name]()
    model, typed, _ = planned(fixture, "int8+fp16")
    paired = paired_of(model, typed)
    run = SlicedRun(paired, shapes.infer(model), 3000)
    for rows, length in ((1, 3), (4, 5), (2, 1)):
        feeds = {
            n: (v[:, :length] if v.dtype == np.int64 or n == "features" else v)
            for n, v in fixture.batch(rows).items()
        }
        alone = all_values(model.proto, model.weights, feeds)
        for part in run.run(feeds):
            for seen in part:
                assert same(seen.reference, alone[seen.watch.tensor])
                for other in (seen.emulated, seen.local):
                    assert other is None or other.shape == seen.reference.shape


def emitted(paired: Paired) -> set[str]:
    return {
        n.name for group in paired.groups for n in group.nodes if n.name.startswith(("emulated/", "local/"))
    }


CHAIN = [
    node("Mul", "x c", "a", "first"),
    node("Exp", "a", "b", "second"),
    node("Neg", "b", "d", "third"),
    node("Relu", "d", "y", "fourth"),
]


def chain() -> Model:
    return graph(CHAIN, X, "y", {"c": normal(4)})


def test_what_comes_before_the_first_lowered_layer_is_computed_once() -> None:
    model = chain()
    paired = paired_of(model, typed_model(model, {"third": "fp16"}))
    watch = {w.layer: w for w in paired.watches}
    assert (watch["first"].emulated, watch["second"].emulated) == ("", "")
    assert watch["third"].emulated
    assert watch["fourth"].emulated
    assert watch["third"].local == watch["third"].emulated  # its inputs are the reference's anyway
    assert watch["fourth"].local  # it is not lowered, and yet receives the reference's values rounded
    layers = [name.partition("/")[2] for name in emitted(paired) if not name.endswith(("/narrow", "/wide"))]
    assert not {"first", "second"} & set(layers)


@pytest.mark.parametrize("opset", [11, 13])
def test_a_raised_opset_still_shares_what_is_unchanged(opset: int) -> None:
    """INT8 with FP16 scales needs opset 19: nodes that the conversion changes are the same on both sides."""
    nodes = [
        node("ReduceMean", "x", "m", "mean", axes=[1], keepdims=1),
        node("Sub", "x m", "s", "sub"),
        node("Softmax", "s", "p", "softmax", axis=1),
        node("MatMul", "p w", "y", "op"),
    ]
    model = graph(nodes, X, "y", {"w": normal(4, 4)}, opset)
    typed = typed_model(model, {"op": "int8"}, {"p": 1 / 127}, base="fp16")
    assert typed.proto.opset_import[0].version >= 19
    paired = paired_of(model, typed)
    assert [w.layer for w in paired.watches if w.emulated] == ["op"]
    names = [t.name for t in paired.header.graph.initializer]
    assert len(set(names)) == len(names)
    feeds = {"x": normal(3, 4, seed=4)}
    for slice_bytes in (1, 1 << 30):
        seen = observe(paired, model, feeds, slice_bytes)
        assert seen["y"].local is not None
        assert same(seen["y"].local, seen["y"].emulated)


@pytest.mark.parametrize("slice_bytes", [1, 1 << 30])
def test_softmax_of_an_old_opset(slice_bytes: int) -> None:
    """Its output comes from a Reshape that the conversion adds; local error goes through Softmax itself."""
    nodes = [
        node("Mul", "x c", "a", "first"),
        node("Softmax", "a", "p", "softmax", axis=1),
        node("MatMul", "p w", "y", "op"),
    ]
    constants = {"c": normal(5), "w": normal(5, 4)}
    model = graph(nodes, {"x": (FLOAT, ["n", 2, 3, 5])}, "y", constants, 11)
    typed = typed_model(
        model, {"first": "fp16", "softmax": "fp16", "op": "int8"}, {"p": 1 / 127}, base="fp16"
    )
    x = normal(2, 2, 3, 5, seed=3)
    seen = observe(paired_of(model, typed), model, {"x": x}, slice_bytes)
    logits = rounded(x * normal(5), HALF).reshape(2, -1).astype(np.float64)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    right = rounded((e / e.sum(axis=1, keepdims=True)).astype(np.float32), HALF).reshape(x.shape)
    for got in (seen["p"].local, seen["p"].emulated):
        assert got is not None
        assert steps_apart(got, right, HALF) <= 1
    assert seen["a"].watch.layer == "first"


def test_a_layer_that_repairs_is_told_from_one_that_breaks() -> None:
    """x^2 overflows, and 1 / x^2 of it is 0 where the reference is 1e-6: its own error is small."""
    nodes = [node("Mul", "x x", "s", "square"), node("Reciprocal", "s", "y", "inverse")]
    model = graph(nodes, X)
    seen = observe(
        paired_of(model, typed_model(model, {"square": "fp16", "inverse": "fp16"})),
        model,
        {"x": np.full((1, 4), 300, np.float32)},
    )
    assert np.isinf(seen["s"].local).all()
    assert (seen["y"].emulated == 0).all()
    assert np.isinf(rounded(np.float32([90000]), HALF)).all()
    assert (
        seen["y"].local == 0
    ).all()  # what it receives is the reference's 90000, rounded to FP16: infinity


def test_views_inherit_from_the_tensor_that_they_show() -> None:
    nodes = [
        node("Mul", "x c", "a", "mul"),
        node("Reshape", "a shape", "b", "reshape"),
        node("Transpose", "b", "d", "transpose"),
        node("Neg", "d", "y", "neg"),
    ]
    model = graph(nodes, {"x": (FLOAT, [2, 4])}, "y", {"c": normal(4), "shape": np.array([4, 2])})
    paired = paired_of(model, typed_model(model, {n.name: "fp16" for n in nodes}))
    assert {w.tensor: w.source for w in paired.watches} == {"a": "a", "b": "a", "d": "a", "y": "y"}
    assert observe(paired, model, {"x": normal(2, 4)}).keys() == {"a", "y"}


def test_a_view_that_is_an_output_is_observed_itself() -> None:
    nodes = [node("Mul", "x c", "a", "mul"), node("Reshape", "a shape", "y", "reshape")]
    model = graph(nodes, {"x": (FLOAT, [2, 4])}, "y", {"c": normal(4), "shape": np.array([4, 2])})
    seen = observe(
        paired_of(model, typed_model(model, {"mul": "fp16", "reshape": "fp16"})), model, {"x": normal(2, 4)}
    )
    assert seen.keys() == {"a", "y"}
    assert seen["y"].emulated is not None
    assert same(seen["y"].emulated.reshape(2, 4), seen["a"].emulated)


def test_a_view_of_a_graph_input() -> None:
    nodes = [node("Reshape", "x shape", "a", "reshape"), node("Mul", "a c", "y", "mul")]
    model = graph(nodes, {"x": (FLOAT, [2, 4])}, "y", {"c": normal(2), "shape": np.array([4, 2])})
    x = normal(2, 4, seed=9)
    seen = observe(paired_of(model, typed_model(model, {"reshape": "fp16", "mul": "fp16"})), model, {"x": x})
    assert same(seen["y"].emulated, rounded(rounded(x.reshape(4, 2), HALF) * rounded(normal(2), HALF), HALF))


@pytest.mark.parametrize("reader", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("slice_bytes", [1, 1 << 30])
def test_an_output_that_is_read_inside(reader: str, slice_bytes: int) -> None:
    nodes = [node("Mul", "x c", "mid", "first"), node("Exp", "mid", "y", "second")]
    model = graph(nodes, X, "mid y", {"c": normal(4)})
    paired = paired_of(model, typed_model(model, {"first": "fp16", "second": reader}))
    x = normal(3, 4, seed=5)
    seen = observe(paired, model, {"x": x}, slice_bytes)
    mid = rounded(rounded(x, HALF) * rounded(normal(4), HALF), HALF)
    assert same(seen["mid"].emulated, mid)
    if reader == "fp16":
        assert (
            steps_apart(
                seen["y"].emulated, rounded(np.exp(mid.astype(np.float64)).astype(np.float32), HALF), HALF
            )
            <= 1
        )
        assert steps_apart(seen["y"].local, rounded(np.exp(rounded(x * normal(4), HALF)), HALF), HALF) <= 1
    if reader == "fp32":  # its own error is what the rounding of its input does
        assert np.allclose(seen["y"].local, np.exp(rounded(x * normal(4), HALF)), rtol=1e-6)


def test_every_output_of_a_split() -> None:
    nodes = [
        node("Mul", "x c", "a", "mul"),
        node("Split", "a", "l r", "split", axis=1),
        node("Add", "l r", "s", "add"),
        node("Concat", "r s", "y", "cat", axis=1),
    ]
    model = graph(nodes, X, "y", {"c": normal(4)}, 13)
    paired = paired_of(model, typed_model(model, {n.name: "fp16" for n in nodes}))
    x = normal(2, 4, seed=6)
    seen = observe(paired, model, {"x": x})
    a = rounded(rounded(x, HALF) * rounded(normal(4), HALF), HALF)
    exact = rounded(x * normal(4), HALF)
    assert same(seen["l"].emulated, a[:, :2])
    assert same(seen["r"].emulated, a[:, 2:])
    assert same(seen["l"].local, exact[:, :2])
    assert same(seen["r"].local, exact[:, 2:])


def test_a_quantizer_is_shared_and_local_sees_the_reference_through_it() -> None:
    nodes = [
        node("Mul", "x c", "a", "mul"),
        node("MatMul", "a w1", "l", "left"),
        node("MatMul", "a w2", "r", "right"),
        node("Add", "l r", "y", "add"),
    ]
    constants = {"c": normal(4), "w1": normal(4, 4, seed=1), "w2": normal(4, 4, seed=2)}
    model = graph(nodes, X, "y", constants)
    formats = {"mul": "fp16", "left": "int8", "right": "int8", "add": "fp16"}
    scale = np.float32(0.05)
    typed = typed_model(model, formats, {"a": float(scale)})
    paired = paired_of(model, typed)
    received = [n.name for g in paired.groups for n in g.nodes if n.op_type == "QuantizeLinear"]
    assert len(received) == 2  # one accumulated, one for the reference's values
    x = normal(3, 4, seed=7)
    seen = observe(paired, model, {"x": x})
    through = quantize_int8(x * normal(4), scale).astype(np.float32) * scale
    for tensor, name in (("l", "w1"), ("r", "w2")):
        step = np.abs(constants[name]).max(0) / np.float32(127)
        weight = np.rint(constants[name] / step) * step
        assert np.allclose(seen[tensor].local, through @ weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["If", "Loop"])
@pytest.mark.parametrize("slice_bytes", [1, 1 << 30])
def test_a_branching_layer(op: str, slice_bytes: int) -> None:
    value = helper.make_tensor_value_info
    if op == "If":
        then = helper.make_graph([node("Mul", "s c", "t", "in_mul")], "then", [], [value("t", FLOAT, None)])
        other = helper.make_graph([node("Neg", "s", "u", "in_neg")], "other", [], [value("u", FLOAT, None)])
        branch = node("If", "flag", "b", "branch", then_branch=then, else_branch=other)
    else:
        body = helper.make_graph(
            [node("Add", "state s", "next", "in_add"), node("Identity", "go", "still", "in_go")],
            "body",
            [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, None)],
            [value("still", BOOL, []), value("next", FLOAT, None)],
        )
        branch = node("Loop", "three flag s", "b", "branch", body=body)
    nodes = [node("Mul", "x c", "s", "scale"), branch, node("Exp", "b", "y", "last")]
    model = graph(nodes, {**X, "flag": (BOOL, [])}, "y", {"c": normal(4), "three": np.array(3)})
    paired = paired_of(model, typed_model(model, {"scale": "fp16", "last": "fp16"}))
    x = normal(2, 4, seed=8)
    for flag in (True, False):
        seen = observe(paired, model, {"x": x, "flag": np.array(flag)}, slice_bytes)
        s = rounded(rounded(x, HALF) * rounded(normal(4), HALF), HALF)
        right = (s * normal(4) if flag else -s) if op == "If" else (s + s + s + s if flag else s)
        assert same(seen["b"].emulated, right)
        exact = rounded(x * normal(4), HALF)
        own = (exact * normal(4) if flag else -exact) if op == "If" else (exact * 4 if flag else exact)
        assert np.allclose(seen["b"].local, own, rtol=1e-6)
        assert seen["y"].local is not None


def test_outputs_are_observed_even_when_nothing_is_lowered() -> None:
    model = chain()
    seen = observe(paired_of(model, typed_model(model, {})), model, {"x": normal(2, 4)})
    assert seen.keys() == {"y"}
    assert same(seen["y"].emulated, seen["y"].reference)


def test_a_graph_input_that_is_an_output() -> None:
    model = graph([node("Relu", "x", "y", "relu")], X, "x y")
    seen = observe(paired_of(model, typed_model(model, {"relu": "fp16"})), model, {"x": normal(2, 4)})
    assert "y" in seen
