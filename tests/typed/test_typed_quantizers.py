"""Q/DQ as TensorRT wants it: which operands, which axes, which codes (checked against plain NumPy)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from typed_tools import FLOAT, HALF, INT64, Rewritten, apply_as, graph, node, normal

from diag.errors import TableError
from diag.plan.resolve import resolve
from diag.plan.schema import Plan

X24 = {"x": (FLOAT, ["n", 4])}


def codes_of(weight: NDArray[np.float32], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric codes, round half to even, one scale of absmax / 127 for each index of `axis`."""
    moved = np.moveaxis(weight.astype(np.float64), axis, 0)
    codes, scales = np.empty(moved.shape, np.int8), np.empty(len(moved), np.float32)
    for channel, values in enumerate(moved):
        peak = float(np.abs(values).max()) or 1.0
        scales[channel] = np.float32(peak / 127)
        quotient = values.astype(np.float32) / scales[channel]
        codes[channel] = np.clip(np.round(quotient), -128, 127)
    return np.moveaxis(codes, 0, axis), scales


def dequantizer(case: Rewritten, layer: str, index: int) -> Any:
    found = case.producer[case.node[layer].input[index]]
    assert found.op_type == "DequantizeLinear"
    return found


def check_weight(case: Rewritten, layer: str, index: int, weight: NDArray[np.float32], axis: int) -> None:
    found = dequantizer(case, layer, index)
    codes, scale, zero = (case.constants[name] for name in found.input)
    expected, scales = codes_of(weight, axis)
    assert {a.name: a.i for a in found.attribute} == {"axis": axis}
    assert codes.dtype == np.int8
    assert np.array_equal(codes, expected)
    assert np.array_equal(scale, scales)
    assert zero.dtype == np.int8
    assert not zero.any()
    assert zero.shape == scale.shape == (weight.shape[axis],)


def check_activation(case: Rewritten, layer: str, index: int, tensor: str, scale: float) -> None:
    found = dequantizer(case, layer, index)
    quantizer = case.producer[found.input[0]]
    assert quantizer.op_type == "QuantizeLinear"
    assert quantizer.input[0] == tensor
    assert quantizer.input[1:] == found.input[1:]
    step, zero = (case.constants[name] for name in quantizer.input[1:])
    assert step.shape == zero.shape == ()
    assert zero.dtype == np.int8
    assert zero == 0
    assert step == pytest.approx(scale, rel=1e-6)


LINEAR = {
    # operator, attributes, weight shape, input shape, channel axis
    "conv": ("Conv", {"kernel_shape": [3, 3]}, (6, 4, 3, 3), (1, 4, 8, 8), 0),
    "conv-1d": ("Conv", {}, (6, 4, 3), (1, 4, 8), 0),
    "conv-3d": ("Conv", {}, (6, 4, 2, 2, 2), (1, 4, 4, 4, 4), 0),
    "conv-depthwise": ("Conv", {"group": 4}, (4, 1, 3, 3), (1, 4, 8, 8), 0),
    "conv-transpose": ("ConvTranspose", {}, (4, 6, 3, 3), (1, 4, 8, 8), 1),
    "conv-transpose-groups": ("ConvTranspose", {"group": 2}, (4, 3, 3, 3), (1, 4, 8, 8), 1),
    "matmul": ("MatMul", {}, (4, 5), (3, 4), 1),
    "matmul-batched-weight": ("MatMul", {}, (2, 4, 5), (2, 3, 4), 2),
    "gemm": ("Gemm", {}, (4, 5), (3, 4), 1),
    "gemm-trans-b": ("Gemm", {"transB": 1}, (5, 4), (3, 4), 0),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("opset", [11, 17, 21])
def test_linear_operands(name: str, opset: int) -> None:
    op, attributes, shape, given, axis = LINEAR[name]
    weight = normal(*shape) * np.logspace(-2, 1, shape[axis]).reshape(
        [-1 if i == axis else 1 for i in range(len(shape))]
    )
    weight = weight.astype(np.float32)
    x = normal(*given, seed=1)
    model = graph(
        [node(op, "x w", "y", "op", **attributes)],
        {"x": (FLOAT, list(given))},
        constants={"w": weight},
        opset=opset,
    )
    case = apply_as(model, {"op": "int8"}, {"x": x})
    check_weight(case, "op", 1, weight, axis)
    check_activation(case, "op", 0, "x", float(np.abs(x).max()) / 127)
    assert case.typed.formats["op"] == "int8"
    assert "w" not in case.constants  # no FP32 twin stays behind


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "axis"),
    [
        ("MatMul", {}, (5, 4), 0),
        ("MatMul", {}, (2, 5, 4), 1),
        ("Gemm", {}, (5, 4), 0),
        ("Gemm", {"transA": 1}, (4, 5), 1),
    ],
)
def test_weight_on_the_left(op: str, attributes: dict[str, int], shape: tuple[int, ...], axis: int) -> None:
    weight, x = normal(*shape), normal(4, 3, seed=1)
    model = graph([node(op, "w x", "y", "op", **attributes)], {"x": (FLOAT, [4, 3])}, constants={"w": weight})
    case = apply_as(model, {"op": "int8"}, {"x": x})
    check_weight(case, "op", 0, weight, axis)
    check_activation(case, "op", 1, "x", float(np.abs(x).max()) / 127)


def test_ties_saturation_and_dead_channels() -> None:
    weight = np.array([[127, 0], [0.5, 0], [1.5, 0], [2.5, 0], [-0.5, 0], [-127, 0]], np.float32)
    model = graph([node("MatMul", "x w", "y", "op")], {"x": (FLOAT, [1, 6])}, constants={"w": weight})
    case = apply_as(model, {"op": "int8"}, {"x": normal(1, 6)})
    codes, scale, _ = (case.constants[name] for name in dequantizer(case, "op", 1).input)
    assert codes[:, 0].tolist() == [127, 0, 2, 2, 0, -127]
    assert scale[0] == 1
    assert codes[:, 1].tolist() == [0] * 6
    assert 0 < scale[1] < np.inf  # TensorRT refuses 0


@pytest.mark.parametrize("views", [["Identity"], ["Transpose"], ["Identity", "Transpose", "Identity"]])
def test_weight_behind_views(views: list[str]) -> None:
    stored = normal(5, 4)
    nodes, name = [], "w"
    for number, op in enumerate(views):
        nodes.append(node(op, name, f"v{number}", f"view{number}"))
        name = f"v{number}"
    seen = stored.T if "Transpose" in views else stored.reshape(5, 4)
    x = normal(3, seen.shape[0], seed=1)
    model = graph(
        [*nodes, node("MatMul", f"x {name}", "y", "op")],
        {"x": (FLOAT, list(x.shape))},
        constants={"w": stored},
    )
    case = apply_as(model, {"op": "int8"}, {"x": x})
    check_weight(case, "op", 1, np.ascontiguousarray(seen), 1)
    assert not case.node.keys() & {f"view{i}" for i in range(len(views))}  # folded away


def test_weight_reshaped_and_stored_as_half() -> None:
    stored = normal(20).astype(np.float16)
    nodes = [
        node("Cast", "w", "wide", "cast", to=FLOAT),
        node("Reshape", "wide shape", "matrix", "reshape"),
        node("MatMul", "x matrix", "y", "op"),
    ]
    constants = {"w": stored, "shape": np.array([4, -1])}
    case = apply_as(graph(nodes, X24, constants=constants), {"op": "int8"}, {"x": normal(2, 4)})
    check_weight(case, "op", 1, stored.astype(np.float32).reshape(4, 5), 1)


def test_one_quantizer_for_all_readers() -> None:
    weights = {f"w{i}": normal(4, 4, seed=i) for i in range(3)}
    nodes = [node("MatMul", f"x w{i}", f"y{i}", f"op{i}") for i in range(3)]
    nodes += [node("MatMul", "x w0", "y3", "op3"), node("Relu", "x", "y4", "relu")]
    outputs = {f"y{i}": FLOAT for i in range(5)}
    model = graph(nodes, X24, outputs, weights)
    case = apply_as(model, {f"op{i}": "int8" for i in range(4)}, {"x": normal(2, 4)})
    kinds = [n.op_type for n in case.typed.proto.graph.node]
    assert kinds.count("QuantizeLinear") == 1
    assert kinds.count("DequantizeLinear") == 4  # x, w0 (shared by op0 and op3), w1, w2
    assert case.node["op0"].input[1] == case.node["op3"].input[1]
    assert case.node["relu"].input[0] == "x"


def test_one_weight_on_two_axes() -> None:
    """A tied embedding: MatMul reads the table, Gemm reads it transposed."""
    table = normal(4, 4)
    nodes = [node("MatMul", "x w", "y", "op"), node("Gemm", "x w", "z", "head", transB=1)]
    case = apply_as(
        graph(nodes, X24, {"y": FLOAT, "z": FLOAT}, {"w": table}),
        {"op": "int8", "head": "int8"},
        {"x": normal(2, 4)},
    )
    check_weight(case, "op", 1, table, 1)
    check_weight(case, "head", 1, table, 0)


def test_a_weight_that_another_layer_reads_stays_for_it() -> None:
    nodes = [node("MatMul", "x w", "y", "op"), node("Gather", "w ids", "z", "embed")]
    model = graph(nodes, {**X24, "ids": (INT64, ["m"])}, {"y": FLOAT, "z": FLOAT}, {"w": normal(4, 5)})
    case = apply_as(model, {"op": "int8"}, {"x": normal(2, 4), "ids": np.array([1])})
    assert case.node["embed"].input[0] == "w"
    assert np.array_equal(case.constants["w"], normal(4, 5))


def test_a_bias_is_left_alone() -> None:
    nodes = [node("Gemm", "x w b", "y", "op")]
    model = graph(nodes, X24, constants={"w": normal(4, 5), "b": normal(5)})
    case = apply_as(model, {"op": "int8"}, {"x": normal(2, 4)})
    assert case.node["op"].input[2] == "b"


def test_two_activations_are_both_quantized() -> None:
    nodes = [node("MatMul", "a b", "y", "op")]
    model = graph(nodes, {"a": (FLOAT, [2, 3]), "b": (FLOAT, [3, 2])})
    feeds = {"a": normal(2, 3), "b": normal(3, 2, seed=1) * 9}
    case = apply_as(model, {"op": "int8"}, feeds)
    for index, name in enumerate("ab"):
        check_activation(case, "op", index, name, float(np.abs(feeds[name]).max()) / 127)


def test_a_pinned_add_and_concat_quantize_every_activation() -> None:
    nodes = [node("Add", "x c", "s", "add"), node("Concat", "x s", "y", "cat", axis=0)]
    model = graph(nodes, X24, constants={"c": normal(4)})
    x = normal(2, 4)
    case = apply_as(model, {"add": "int8", "cat": "int8"}, {"x": x})
    check_activation(case, "add", 0, "x", float(np.abs(x).max()) / 127)
    assert case.node["add"].input[1] == "c"
    check_activation(case, "cat", 1, "s", float(np.abs(x + normal(4)).max()) / 127)


@pytest.mark.parametrize(("base", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_base_types_the_scales(base: str, dtype: Any) -> None:
    weight = normal(4, 5)
    model = graph([node("MatMul", "x w", "y", "op")], X24, constants={"w": weight})
    x = normal(2, 4, seed=1)
    case = apply_as(model, {"op": "int8"}, {"x": x}, base=base)
    assert case.typed.proto.opset_import[0].version >= 19
    found = dequantizer(case, "op", 1)
    codes, scale, _ = (case.constants[name] for name in found.input)
    assert scale.dtype == dtype
    stored = (np.abs(weight).max(0) / 127).astype(np.float32).astype(dtype)
    assert np.array_equal(scale, stored)
    expected = np.clip(np.round(weight / stored.astype(np.float32)), -128, 127)
    assert np.array_equal(codes, expected)  # with the scale as it is stored, not as it was measured
    step = case.constants[dequantizer(case, "op", 0).input[1]]
    assert step == np.float32(np.abs(x).max() / 127).astype(dtype)


@pytest.mark.parametrize("peak", [1e-7, 1e-5, 1e7, 1e30])
def test_fp16_scales_are_neither_zero_nor_infinite(peak: float) -> None:
    weight = normal(4, 5) * np.float32(peak)
    model = graph([node("MatMul", "x w", "y", "op")], X24, constants={"w": weight})
    case = apply_as(model, {"op": "int8"}, {"x": normal(2, 4) * np.float32(peak)}, base="fp16")
    for index in (0, 1):
        scale = case.constants[dequantizer(case, "op", index).input[1]].astype(np.float32)
        assert (scale > 0).all()
        assert np.isfinite(scale).all()


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_is_refused(scale: float | None) -> None:
    from diag.typed.apply import apply_formats

    model = graph([node("MatMul", "x w", "y", "op")], X24, constants={"w": normal(4, 5)})
    with pytest.raises(TableError, match="tensor 'x'"):
        apply_formats(model, {"op": "int8"}, scales={} if scale is None else {"int8": {"x": scale}})


# Quantizers that the model brings.

DEQUANTIZED = [
    node("QuantizeLinear", "x sx zx", "xq", "q"),
    node("DequantizeLinear", "xq sx zx", "xd", "dq"),
    node("DequantizeLinear", "wq sw zw", "wd", "dq_w", axis=1),
]
QUANTIZER = {
    "sx": np.float32(0.02),
    "zx": np.int8(0),
    "wq": np.arange(-10, 10, dtype=np.int8).reshape(4, 5),
    "sw": np.full(5, 0.01, np.float32),
    "zw": np.zeros(5, np.int8),
}


def test_a_layer_behind_the_models_own_quantizers_is_not_quantized_twice() -> None:
    nodes = [*DEQUANTIZED, node("MatMul", "xd wd", "y", "op")]
    model = graph(nodes, X24, constants=QUANTIZER)
    formats = resolve(Plan(default="int8"), model, {}, {}, ()).formats
    case = apply_as(model, formats, {"x": normal(2, 4)})
    assert list(case.node["op"].input) == ["xd", "wd"]
    assert [n.name for n in case.typed.proto.graph.node] == ["q", "dq", "dq_w", "op"]
    assert case.typed.formats["op"] == "int8"
    assert any("quantizers that the model brings" in note and "op" in note for note in case.typed.notes)


@pytest.mark.parametrize("view", ["Reshape", "Transpose"])
def test_the_models_quantizer_is_seen_through_views(view: str) -> None:
    nodes = [*DEQUANTIZED[:2], node(view, "xd shape" if view == "Reshape" else "xd", "v", "view")]
    nodes.append(node("MatMul", "v w", "y", "op"))
    constants = {**QUANTIZER, "shape": np.array([4, 4]), "w": normal(4, 5)}
    case = apply_as(
        graph(nodes, {"x": (FLOAT, [4, 4])}, constants=constants), {"op": "int8"}, {"x": normal(4, 4)}
    )
    assert case.node["op"].input[0] == "v"
    check_weight(case, "op", 1, normal(4, 5), 1)  # its weight was not quantized, and now is
    assert case.typed.formats["op"] == "int8"


@pytest.mark.parametrize("base", ["fp32", "fp16"])
def test_what_cannot_be_quantized_stays_whole_and_is_noted(base: str) -> None:
    """A vector, a computed weight: quantizing only the other operand would cost accuracy for nothing."""
    nodes = [
        node("MatMul", "x v", "a", "by_vector"),
        node("Mul", "w w", "square", "computed"),
        node("MatMul", "x square", "b", "by_computed"),
    ]
    model = graph(nodes, X24, {"a": FLOAT, "b": FLOAT}, {"v": normal(4), "w": normal(4, 5)})
    case = apply_as(model, {"by_vector": "int8", "by_computed": "int8"}, {"x": normal(2, 4)}, base=base)
    assert not [n for n in case.typed.proto.graph.node if "Quantize" in n.op_type]
    assert case.typed.formats["by_vector"] == case.typed.formats["by_computed"] == base
    assert any("2 layer(s) are not quantized" in note for note in case.typed.notes)


def test_half_models_keep_their_halves_and_say_so() -> None:
    """A model exported in half: INT8 would need scales of its type; nothing is lowered behind its back."""
    weight = numpy_helper.to_array(numpy_helper.from_array(normal(4, 5).astype(np.float16)))
    model = graph([node("MatMul", "x w", "y", "op")], {"x": (HALF, ["n", 4])}, {"y": HALF}, {"w": weight})
    for fmt in ("int8", "bf16"):
        case = apply_as(model, {"op": fmt}, {"x": normal(2, 4).astype(np.float16)})
        assert case.typed.formats["op"] == "fp16"
        assert [n.op_type for n in case.typed.proto.graph.node] == ["MatMul"]
        assert case.typed.notes
