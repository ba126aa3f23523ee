"""The axis of a weight's scales, by brute force; biases against the integers that they are added in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.pipeline.calibrate.tables import calibrate_model, convert_model
from diag.pipeline.compare.job import compare
from diag.pipeline.prepare import Planned, plan_on
from diag.pipeline.settings import CompareSettings
from diag.pipeline.structure import structure_findings, structure_notes
from diag.plan.schema import Plan, plan_for_format, plan_from_mapping
from diag.progress import Silent
from diag.typed.apply import TypedModel, apply_formats
from diag.typed.bias_range import bias_ratios
from diag.typed.operands import weight_axis
from fixtures.graphs import bert

Array = NDArray[np.float32]
RNG = np.random.default_rng(11)


def single(op: str, x: list[int], constants: Mapping[str, Array], inputs: str, **attributes: Any) -> Model:
    graph = helper.make_graph(
        [helper.make_node(op, inputs.split(), ["y"], name="op", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


CASES: dict[str, tuple[str, list[int], list[int], str, int, dict[str, Any]]] = {
    # name: operator, shape of x, of w, order of inputs, operand number, attributes
    "conv": ("Conv", [1, 2, 5, 5], [3, 2, 3, 3], "x w", 1, {}),
    "conv-groups": ("Conv", [1, 4, 5, 5], [6, 2, 3, 3], "x w", 1, {"group": 2}),
    "conv-depthwise": ("Conv", [1, 3, 5, 5], [3, 1, 3, 3], "x w", 1, {"group": 3}),
    "conv-transpose": ("ConvTranspose", [1, 2, 3, 3], [2, 3, 2, 2], "x w", 1, {}),
    "conv-transpose-groups": ("ConvTranspose", [1, 4, 3, 3], [4, 3, 2, 2], "x w", 1, {"group": 2}),
    "matmul": ("MatMul", [4, 3], [3, 5], "x w", 1, {}),
    "matmul-left": ("MatMul", [3, 4], [5, 3], "w x", 0, {}),
    "matmul-batched": ("MatMul", [2, 4, 3], [2, 3, 5], "x w", 1, {}),
    "gemm": ("Gemm", [4, 3], [3, 5], "x w", 1, {}),
    "gemm-trans-b": ("Gemm", [4, 3], [5, 3], "x w", 1, {"transB": 1}),
    "gemm-trans-a": ("Gemm", [3, 4], [3, 5], "w x", 0, {"transA": 1}),
    "gemm-left": ("Gemm", [3, 4], [5, 3], "w x", 0, {}),
}


def separable_axes(model: Model, x: Array, weight: Array) -> set[int]:
    """Axes whose scales can be taken out of the sums: no output element depends on two of their indices."""
    session = Session(model.proto, model.weights)
    # as an input, so that it can be changed: dependence of every output element on every weight
    plain = session.run({"x": x, "w": weight})["y"]
    depends = np.zeros((*weight.shape, plain.size), bool)
    for index in np.ndindex(*weight.shape):
        changed = weight.copy()
        changed[index] += 1
        depends[index] = (session.run({"x": x, "w": changed})["y"] != plain).reshape(-1)
    found = set()
    for axis in range(weight.ndim):
        others = tuple(i for i in range(weight.ndim) if i != axis)
        if (depends.any(axis=others).sum(axis=0) <= 1).all():
            found.add(axis)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_axis_is_one_whose_scales_leave_the_sums(name: str) -> None:
    op, given_shape, shape, order, operand, attributes = CASES[name]
    x = RNG.uniform(1, 2, given_shape).astype(np.float32)
    weight = RNG.uniform(1, 2, shape).astype(np.float32)
    model = single(op, given_shape, {"w": weight}, order, **attributes)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.initializer[:]
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, shape))
    axes = separable_axes(from_proto(proto), x, weight)
    chosen = weight_axis(model.layers[0], operand, weight.ndim)
    assert chosen in axes
    assert all(axis == chosen or shape[axis] == 1 or name == "matmul-batched" for axis in axes)


@pytest.mark.parametrize("name", CASES)
def test_scales_along_it_are_exact_where_each_channel_has_its_own_grid(name: str) -> None:
    """Weights that are integers times a step of their own channel survive; on another axis they do not."""
    op, given_shape, shape, order, operand, attributes = CASES[name]
    axis = weight_axis(
        single(op, given_shape, {"w": np.zeros(shape, np.float32)}, order).layers[0], operand, 9
    )
    del axis  # the rank matters; it is asked for below with the right one
    layer = single(op, given_shape, {"w": np.zeros(shape, np.float32)}, order, **attributes).layers[0]
    axis = weight_axis(layer, operand, len(shape))
    codes = RNG.integers(-127, 128, shape)
    codes.reshape(-1)[:] = np.clip(codes.reshape(-1), -127, 127)
    np.moveaxis(codes, axis, 0).reshape(shape[axis], -1)[:, 0] = 127
    steps = (10.0 ** RNG.uniform(-4, 1, shape[axis])).astype(np.float32)
    along = [-1 if i == axis else 1 for i in range(len(shape))]
    moved = np.moveaxis(codes, axis, 0).copy()
    moved.reshape(shape[axis], -1)[:, 0] = 127
    codes = np.moveaxis(moved, 0, axis)
    weight = (codes * steps.reshape(along)).astype(np.float32)
    model = single(op, given_shape, {"w": weight}, order, **attributes)
    x = RNG.integers(-5, 6, given_shape).astype(np.float32)
    typed = apply_formats(model, {"op": "int8"}, scales={"int8": {"x": 1.0}})
    got = Session(typed.proto, typed.weights).run({"x": x})["y"]
    wanted = Session(model.proto, model.weights).run({"x": x})["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max()))


# Biases.


def with_bias(op: str, weight: Array, bias: Array, x: list[int], **attributes: Any) -> TypedModel:
    model = single(op, x, {"w": weight, "b": bias}, "x w b", **attributes)
    return apply_formats(model, {"op": "int8"}, scales={"int8": {"x": 0.5}})


def ratios(typed: TypedModel) -> Mapping[str, float]:
    return bias_ratios(typed.model)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-12, 2), min_size=4, max_size=4),
    st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4),
    st.sampled_from(["Conv", "ConvTranspose", "Gemm", "Gemm-transB"]),
)
def test_ratios_by_hand(exponents: list[float], biases: list[float], kind: str) -> None:
    """Largest |bias| / (s_x s_w) over channels, s_w = absmax / 127."""
    peaks, bias = np.float32(10.0) ** np.array(exponents, np.float32), np.array(biases, np.float32)
    op, _, flag = kind.partition("-")
    shape = {"Conv": (4, 3, 1, 1), "ConvTranspose": (3, 4, 1, 1)}.get(op, (4, 3) if flag else (3, 4))
    axis = {"Conv": 0, "ConvTranspose": 1}.get(op, 0 if flag else 1)
    weight = np.ones(shape, np.float32) * peaks.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    x = [1, 3, 2, 2] if op.startswith("Conv") else [2, 3]
    found = ratios(with_bias(op, weight, bias, x, **({flag: 1} if flag else {})))["op"]
    steps = np.float64(0.5) * (peaks.astype(np.float64) / 127)
    assert found == pytest.approx(float(np.max(np.abs(bias) / steps)), rel=1e-5)


def test_groups_of_a_transposed_convolution_share_steps() -> None:
    weight = np.ones((4, 2, 1, 1), np.float32)
    weight[:, 1] = 1e-3
    typed = with_bias("ConvTranspose", weight, np.array([0, 1, 0, 3], np.float32), [1, 4, 2, 2], group=2)
    assert ratios(typed)["op"] == pytest.approx(3 / (0.5 * 1e-3 / 127), rel=1e-5)


def linear(weight: Array, bias: Array) -> Model:
    """MatMul and an Add, as exporters write a linear layer."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["p"], name="op"),
            helper.make_node("Add", ["p", "b"], ["y"], name="bias"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


TINY = np.array([1, 1, 1, 1e-7], np.float32) * np.ones((3, 4), np.float32)
BIAS = np.array([1, 1, 1, 5], np.float32)


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """Channel 3: s_w = 1e-7 / 127 = 7.9e-10, so a bias of 5 needs more than 2^31 (recipe R16)."""
    onnx.save(linear(TINY, BIAS).proto, tmp_path / "model.onnx")
    np.savez(tmp_path / "batch.npz", x=np.full((2, 3), 63.5, np.float32))
    return tmp_path


def test_a_bias_beyond_the_sums_is_a_finding(overflowing: Path) -> None:
    files = CompareSettings(
        str(overflowing / "model.onnx"),
        str(overflowing / "batch.npz"),
        str(overflowing / "out"),
        format="int8",
    )
    (found,) = [f for f in compare(files, Silent()).findings if f.id == "bias-range"]
    assert (found.kind, found.severity, found.layers) == ("qdq-structure", "error", ["op"])
    assert found.evidence["bias_in_steps"] == pytest.approx(5 / (0.5 * 1e-7 / 127), rel=1e-3)


def test_convert_says_it_too(overflowing: Path) -> None:
    table = str(overflowing / "table.json")
    model, data = str(overflowing / "model.onnx"), str(overflowing / "batch.npz")
    calibrate_model(model, data, table, None, Silent())
    typed = convert_model(model, None, "int8", table, str(overflowing / "typed.onnx"))
    assert any("does not fit the 32-bit sums of INT8 at op" in note for note in typed.notes)


@pytest.mark.parametrize("peak", [1.0, 1e-4])
def test_ordinary_biases_are_no_finding(peak: float, tmp_path: Path) -> None:
    weight = np.array([1, 1, 1, peak], np.float32) * np.ones((3, 4), np.float32)
    onnx.save(linear(weight, BIAS).proto, tmp_path / "model.onnx")
    planned = plan_on(str(tmp_path / "model.onnx"), plan_for_format("int8"))
    typed = apply_formats(planned.model, planned.resolved.formats, scales={"int8": {"x": 0.5}})
    assert structure_findings(planned, typed) == []


# Attention in two types.


def attention(tmp_path: Path, *pins: Mapping[str, str], default: str = "int8") -> tuple[Planned, TypedModel]:
    fixture = bert()
    onnx.save(fixture.model, tmp_path / "model.onnx")
    plan: Plan = plan_from_mapping({"schema": "trtdiag.plan/1", "default": default, "pins": list(pins)})
    planned = plan_on(str(tmp_path / "model.onnx"), plan)
    scales = {fmt: dict.fromkeys(planned.activations, 0.1) for fmt in ("int8", "fp8")}
    return planned, apply_formats(planned.model, planned.resolved.formats, scales=scales)


@pytest.mark.parametrize("role", ["qk_matmul", "pv_matmul"])
def test_one_product_pinned_alone_is_noted(role: str, tmp_path: Path) -> None:
    planned, typed = attention(tmp_path, {"role": role, "format": "fp16"})
    (found,) = structure_findings(planned, typed)
    assert (found.id, found.severity, found.evidence["attentions"]) == ("attention-types", "note", 2)
    assert {planned.roles[layer].name for layer in found.layers} == {"qk_matmul", "pv_matmul"}
    assert found.title in structure_notes(planned, typed)


@pytest.mark.parametrize("fmt", ["fp16", "fp8"])
def test_both_products_pinned_alike_are_not(fmt: str, tmp_path: Path) -> None:
    pins = [{"role": role, "format": fmt} for role in ("qk_matmul", "pv_matmul")]
    planned, typed = attention(tmp_path, *pins)
    assert structure_findings(planned, typed) == []


@pytest.mark.parametrize("default", ["int8", "fp16", "bf16"])
def test_a_plan_without_pins_is_not(default: str, tmp_path: Path) -> None:
    assert structure_findings(*attention(tmp_path, default=default)) == []
