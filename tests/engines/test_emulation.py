"""The emulator against NumPy: each node in FP32, each tensor rounded once to the type that it really has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engine_tools import (
    BFLOAT,
    BOOL,
    FLOAT,
    HALF,
    INT64,
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
from diag.engines.onnxruntime import Session
from diag.model.load import from_proto
from diag.typed.apply import TypedModel
from fixtures.graphs import Dims, GraphFixture, bert, cnn, conformer, detector, gpt2, llama, vit

X = {"x": (FLOAT, ["n"])}


def emulated(typed: TypedModel, feeds: dict[str, Array]) -> dict[str, Array]:
    emulation = emulate(as_model(typed))
    return Session(emulation.proto, emulation.weights).run(feeds)


def check_every_node(typed: TypedModel, feeds: dict[str, Array]) -> int:
    """Compare each node's outputs with NumPy's on the emulator's own inputs; the number of tensors checked.

    Bit for bit where both sides do one operation; one representable number apart where a sum is involved,
    whose order is not fixed.
    """
    emulation = emulate(as_model(typed))
    found = all_values(emulation.proto, emulation.weights, feeds)
    types = elem_types(typed.proto)
    values = {**{k: wide(v) for k, v in constants_of(typed).items()}, **found}
    checked = 0
    for n in typed.proto.graph.node:
        if n.op_type == "Cast" and n.output[0] not in found and n.name.startswith("trtdiag/"):
            values[n.output[0]] = values[n.input[0]]  # widening: merged with its input
            continue
        if n.output[0] in emulation.weights and n.output[0] not in found:
            values[n.output[0]] = emulation.weights[n.output[0]]  # a weight, dequantized beforehand
        if n.op_type == "Constant":
            continue
        expected = evaluate(n, typed.proto, values, types)
        for name, right in zip(n.output, expected, strict=True):
            if name not in values:
                aliases = [
                    c.output[0] for c in typed.proto.graph.node if c.op_type == "Cast" and c.input[0] == name
                ]
                values[name] = next(found[a] for a in aliases if a in found)
            compare(n.op_type, values[name], right, types.get(name, 0))
            checked += 1
    return checked


EXACT = ("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "Max", "Min", "Clip", "Where", "Cast", "Concat")


def compare(op: str, got: Array, right: Array, elem_type: int) -> None:
    assert got.shape == right.shape
    if got.dtype.kind != "f" or op in ("QuantizeLinear", "DequantizeLinear", *EXACT):
        assert np.array_equal(got, right, equal_nan=got.dtype.kind == "f"), op
    elif elem_type in (HALF, BFLOAT):
        assert steps_apart(got, right.astype(np.float32), elem_type) <= 1, op
    else:
        peak = float(np.abs(right[np.isfinite(right)]).max(initial=0))
        assert np.allclose(got, right, rtol=2e-5, atol=1e-6 * peak, equal_nan=True), op


SMALL = Dims(hidden=16, heads=2, kv_heads=1, ffn=24, blocks=1, vocab=31, seq_len=5)

GRAPHS: dict[str, Callable[[], GraphFixture]] = {
    **{make.__name__: partial(make, SMALL) for make in (bert, gpt2, llama, vit, conformer)},
    "cnn": partial(cnn, channels=4, blocks=1, image=8),
    "detector": partial(detector, channels=4, image=16),
    "bert-norm": partial(bert, SMALL, norm="fused"),
    "cnn-11": partial(cnn, channels=4, blocks=1, image=8, opset=11),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_every_tensor_is_rounded_once(name: str, fmt: str) -> None:
    fixture = GRAPHS[name]()
    model = from_proto(fixture.model)
    typed = typed_model(model, {x.id: fmt for x in model.layers if x.op_type != "Constant"})
    assert check_every_node(typed, dict(fixture.batch(2))) >= len(model.layers)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("base", ["fp32", "fp16", "bf16"])
def test_int8_with_a_base(name: str, base: str) -> None:
    fixture = GRAPHS[name]()
    model = from_proto(fixture.model)
    feeds = dict(fixture.batch(2))
    values = all_values(model.proto, model.weights, feeds)
    products = [x for x in model.layers if x.op_type in ("MatMul", "Gemm", "Conv")]
    formats = {x.id: base for x in model.layers} | {x.id: "int8" for x in products}
    scales = {n: float(np.abs(values[n]).max()) / 127 for x in products for n in x.inputs if n in values}
    typed = typed_model(model, formats, scales, base=base)
    assert check_every_node(typed, feeds) >= len(model.layers)


@pytest.mark.parametrize("name", ["gpt2", "vit", "detector"])
def test_formats_in_any_mixture(name: str) -> None:
    fixture = GRAPHS[name]()
    model = from_proto(fixture.model)
    rng = np.random.default_rng(1)
    for _ in range(3):
        formats = {x.id: str(rng.choice(["fp32", "fp16", "bf16"])) for x in model.layers}
        assert check_every_node(typed_model(model, formats), dict(fixture.batch(2))) >= len(model.layers)


# Values where a format ends.

HARD = {
    # FP32 value: in FP16 (ties to even; 65520 is the tie with infinity; 2^-25 that with 0), in BF16
    65519.996: (65504.0, 65536.0),
    65520.0: (np.inf, 65536.0),
    -65520.0: (-np.inf, -65536.0),
    1e5: (np.inf, 99840.0),
    3.4028235e38: (np.inf, np.inf),
    3.3895e38: (np.inf, 3.3895314e38),
    2.0**-24: (2.0**-24, 2.0**-24),
    2.0**-25: (0.0, 2.0**-25),
    1.5 * 2.0**-24: (2.0**-23, 1.5 * 2.0**-24),
    2.0**-14 - 2.0**-26: (2.0**-14, 2.0**-14),
    1e-8: (0.0, 1.0011718e-08),
    2049.0: (2048.0, 2048.0),
    2051.0: (2052.0, 2048.0),
    257.0: (257.0, 256.0),
    259.0: (259.0, 260.0),
    -0.0: (-0.0, -0.0),
    np.inf: (np.inf, np.inf),
    -np.inf: (-np.inf, -np.inf),
    np.nan: (np.nan, np.nan),
}


@pytest.mark.parametrize(("fmt", "index"), [("fp16", 0), ("bf16", 1)])
@pytest.mark.parametrize("op", ["Identity", "Mul", "Neg", "Reshape"])
def test_rounding_at_the_ends(fmt: str, index: int, op: str) -> None:
    extra = {"Mul": " one", "Reshape": " shape"}.get(op, "")
    constants = {"one": np.float32(1), "shape": np.array([-1])}
    model = graph([node(op, f"x{extra}", "y", "op")], X, constants=constants)
    x = np.float32(list(HARD))
    got = emulated(typed_model(model, {"op": fmt}), {"x": x})["y"]
    right = np.float32([value[index] for value in HARD.values()]) * (-1 if op == "Neg" else 1)
    assert np.array_equal(got, right, equal_nan=True)
    assert np.array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(right[~np.isnan(right)]))


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_ten_thousand_random_bit_patterns(fmt: str) -> None:
    bits = np.random.default_rng(5).integers(0, 2**32, 10_000, dtype=np.uint32)
    x = bits.view(np.float32)
    typed = typed_model(graph([node("Identity", "x", "y", "op")], X), {"op": fmt})
    dtype = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[fmt]
    with np.errstate(over="ignore", invalid="ignore"):
        right = x.astype(dtype).astype(np.float32)
    assert np.array_equal(emulated(typed, {"x": x})["y"], right, equal_nan=True)


def test_overflow_between_two_nodes_is_not_hidden() -> None:
    """ONNX Runtime itself computes a chain of FP16 nodes in FP32, and would give 300."""
    nodes = [node("Mul", "x x", "square", "square"), node("Sqrt", "square", "y", "root")]
    typed = typed_model(graph(nodes, X), {"square": "fp16", "root": "fp16"})
    assert emulated(typed, {"x": np.float32([300, 255])})["y"].tolist() == [np.inf, 255]
    bf16 = typed_model(graph(nodes, X), {"square": "bf16", "root": "bf16"})
    assert emulated(bf16, {"x": np.float32([300])})["y"].tolist() == [300]


def test_nan_from_infinity() -> None:
    nodes = [node("Exp", "x", "e", "exp"), node("Sub", "e e", "y", "sub")]
    typed = typed_model(graph(nodes, X), {"exp": "fp16", "sub": "fp16"})
    got = emulated(typed, {"x": np.float32([1, 11.08, 11.1])})["y"]
    assert got[:2].tolist() == [0, 0]
    assert np.isnan(got[2])


def test_only_the_lowered_layer_rounds() -> None:
    nodes = [
        node("Mul", "x x", "a", "first"),
        node("Mul", "a a", "b", "second"),
        node("Mul", "b b", "y", "third"),
    ]
    x = np.float32([1.1, 3.3, 0.07])
    got = emulated(typed_model(graph(nodes, X), {"second": "fp16"}), {"x": x})["y"]
    half = (x * x).astype(np.float16).astype(np.float32)
    b = (half * half).astype(np.float16).astype(np.float32)
    assert np.array_equal(got, b * b)


def test_the_users_own_casts_round_too() -> None:
    """A model that casts to FP16 and back means it."""
    nodes = [
        node("Cast", "x", "h", "down", to=HALF),
        node("Cast", "h", "w", "up", to=FLOAT),
        node("Cast", "ids", "b", "ints", to=BFLOAT),
        node("Cast", "b", "v", "wide", to=FLOAT),
        node("Add", "w v", "y", "add"),
    ]
    model = graph(nodes, {**X, "ids": (INT64, ["n"])})
    x, ids = np.float32([0.1, 2049, 1e5]), np.array([257, 259, 1])
    got = emulated(typed_model(model, {}), {"x": x, "ids": ids})["y"]
    with np.errstate(over="ignore"):
        half = x.astype(np.float16).astype(np.float32)
    assert np.array_equal(got, half + ids.astype(ml_dtypes.bfloat16).astype(np.float32))


# INT8.


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.02, 3.7e-5])
def test_fake_quantization_of_activations(scale: float) -> None:
    steps = np.float32(
        [0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.49, 127.5, 128, 1e9, -127.5, -128.4, -128.6, -1e9]
    )
    x = np.concatenate(
        [steps * np.float32(scale), np.float32([np.inf, -np.inf]), normal(50, scale=60 * scale)]
    )
    model = graph([node("Add", "x c", "y", "op")], X, constants={"c": np.float32(0)})
    got = emulated(typed_model(model, {"op": "int8"}, {"x": scale}), {"x": x})["y"]
    right = quantize_int8(x, np.float32(scale)).astype(np.float32) * np.float32(scale)
    assert np.array_equal(got, right)
    if scale == 1.0:
        assert got[:16].tolist() == [0, 0, 2, 2, 0, -2, -2, 126, 127, 127, 127, 127, -128, -128, -128, -128]


@pytest.mark.parametrize(("base", "elem_type"), [("fp16", HALF), ("bf16", BFLOAT)])
def test_dequantized_values_have_the_base_type(base: str, elem_type: int) -> None:
    model = graph(
        [node("MatMul", "x w", "y", "op")],
        {"x": (FLOAT, ["n", 3])},
        constants={"w": np.eye(3, dtype=np.float32)},
    )
    x = normal(8, 3, scale=3)
    typed = typed_model(model, {"op": "int8"}, {"x": 0.0234}, base=base)
    step = rounded(np.float32(0.0234), elem_type)
    seen = rounded(quantize_int8(rounded(x, elem_type), step).astype(np.float32) * step, elem_type)
    one = rounded(np.float32(1 / 127), elem_type)
    identity = rounded(np.rint(1 / one).astype(np.float32) * one, elem_type)
    assert np.array_equal(emulated(typed, {"x": x})["y"], rounded(seen * identity, elem_type))


def test_weights_are_dequantized_beforehand() -> None:
    weight = normal(6, 4)
    model = graph([node("MatMul", "x w", "y", "op")], {"x": (FLOAT, ["n", 6])}, constants={"w": weight})
    typed = typed_model(model, {"op": "int8"}, {"x": 1e-3})
    emulation = emulate(as_model(typed))
    peak = np.abs(weight).max(axis=0)
    step = (peak.astype(np.float64) / 127).astype(np.float32)
    right = np.clip(np.rint(weight / step), -128, 127).astype(np.float32) * step
    assert [np.array_equal(values, right) for values in emulation.weights.values()] == [True]
    kinds = [n.op_type for n in emulation.proto.graph.node]
    assert kinds == ["QuantizeLinear", "DequantizeLinear", "MatMul"]


# Structure.


def test_emulation_has_no_type_that_the_cpu_lacks() -> None:
    fixture = bert(SMALL, norm="fused")
    model = from_proto(fixture.model)
    emulation = emulate(as_model(typed_model(model, {x.id: "bf16" for x in model.layers})))
    types = elem_types(emulation.proto)
    for n in emulation.proto.graph.node:
        if n.op_type != "Cast":
            assert all(types.get(name) not in (HALF, BFLOAT) for name in (*n.input, *n.output))
    assert {t.data_type for t in emulation.proto.graph.initializer}.isdisjoint({HALF, BFLOAT})
    assert BFLOAT in emulation.half.values()


def branching(op: str) -> Any:
    value = helper.make_tensor_value_info
    if op == "If":
        then = helper.make_graph(
            [node("Mul", "s s", "t", "inner_mul")], "then", [], [value("t", FLOAT, None)]
        )
        other = helper.make_graph(
            [node("Neg", "s", "u", "inner_neg")], "other", [], [value("u", FLOAT, None)]
        )
        return node("If", "flag", "b", "branch", then_branch=then, else_branch=other)
    body = helper.make_graph(
        [node("Add", "state s", "next", "inner_add"), node("Identity", "go", "still", "inner_go")],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, None)],
        [value("still", BOOL, []), value("next", FLOAT, None)],
    )
    return node("Loop", "three flag s", "b", "branch", body=body)


@pytest.mark.parametrize("op", ["If", "Loop"])
@pytest.mark.parametrize("flag", [True, False])
def test_branches_see_the_rounded_tensor(op: str, flag: bool) -> None:
    nodes = [node("Mul", "x x", "s", "scale"), branching(op), node("Mul", "b b", "y", "last")]
    model = graph(nodes, {**X, "flag": (BOOL, [])}, constants={"three": np.array(3)})
    x = np.float32([0.1, 3.3, 100])
    got = emulated(typed_model(model, {"scale": "fp16", "last": "fp16"}), {"x": x, "flag": np.array(flag)})[
        "y"
    ]
    s = rounded(rounded(x, HALF) ** 2, HALF)
    b = (s * s if flag else -s) if op == "If" else (s + s + s + s if flag else s)
    assert np.array_equal(got, rounded(rounded(b, HALF) ** 2, HALF))


def test_a_model_that_is_in_half_itself() -> None:
    """Exported in FP16, graph inputs and outputs included: they keep their types, every node rounds."""
    weight = normal(4, 4).astype(np.float16)
    nodes = [
        node("MatMul", "x w", "a", "op"),
        node("Mul", "a a", "y", "square"),
        node("Identity", "x", "z", "same"),
    ]
    proto = graph(nodes, {"x": (HALF, ["n", 4])}, "y z a", {"w": weight}).proto
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = HALF
    x = normal(3, 4, scale=40).astype(np.float16)
    got = emulated(typed_model(from_proto(proto), {}), {"x": x})
    assert {v.dtype for v in got.values()} == {np.dtype(np.float16)}
    a = rounded(wide(x) @ wide(weight), HALF)
    assert steps_apart(wide(got["a"]), a, HALF) <= 1
    assert np.array_equal(wide(got["y"]), rounded(wide(got["a"]) ** 2, HALF))
    assert np.array_equal(got["z"], x)
