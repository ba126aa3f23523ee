"""Each lint rule on a Q/DQ model that breaks it, and on its nearest neighbour that does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from foreign_models import build, quantized_by_ort
from onnx import TensorProto, helper

from diag.lint.qdq import check_qdq
from diag.model import shapes
from diag.model.load import load_model
from diag.typed.brought import find_quantizers
from diag.typed.types import complete

F = np.float32


def lint(path):
    """Severity and layers of each hazard, by its id."""
    model = load_model(path)
    found = check_qdq(model, find_quantizers(model), complete(shapes.infer(model), model))
    assert len({h.id for h in found}) == len(found)
    return {hazard.id: (hazard.severity, hazard.layers) for hazard in found}


def pair(source, name, axis=None):
    """A QuantizeLinear and a DequantizeLinear with the constants `<name>_s` and `<name>_z`."""
    more = {} if axis is None else {"axis": axis}
    parameters = [f"{name}_s", f"{name}_z"]
    return [
        helper.make_node("QuantizeLinear", [source, *parameters], [f"{name}_q"], f"{name}_q", **more),
        helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_d"], f"{name}_dq", **more),
    ]


@dataclass
class Linear:
    """A linear layer with a quantizer on each operand: per tensor, and by output channel."""

    op: str = "MatMul"
    scale: object = 0.02
    zero_point: object = np.int8(0)
    weight_scale: object = None
    weight_axis: int | None = None
    bias: object = None

    def save(self, path: Path) -> Path:
        sizes = {"MatMul": (16, 32), "Gemm": (16, 32), "Conv": (16, 8, 3, 3), "ConvTranspose": (8, 16, 3, 3)}
        weight = np.random.default_rng(0).normal(size=sizes[self.op]).astype(F)
        right = 0 if self.op == "Conv" else 1
        axis = right if self.weight_axis is None else self.weight_axis
        steps = (
            np.full(weight.shape[axis], 0.03, F)
            if self.weight_scale is None
            else np.asarray(self.weight_scale, F)
        )
        constants = {"w": weight, "w_s": steps, "w_z": np.zeros(steps.shape, np.int8)}
        zero = np.asarray(self.zero_point)
        scale = np.broadcast_to(np.asarray(self.scale, F), zero.shape)
        constants |= {"x_s": scale, "x_z": zero}
        names = ["x_d", "w_d"]
        if self.bias is not None:
            constants["b"] = np.asarray(self.bias, F)
            names.append("b")
        nodes = [*pair("x", "x", 1), *pair("w", "w", axis), helper.make_node(self.op, names, ["y"], "layer")]
        return build(path, nodes, constants, [4, 16] if weight.ndim == 2 else [1, 8, 8, 8])


def channel(value, size=32, place=5):
    scales = np.full(size, 0.03, F)
    scales[place] = value
    return scales


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Conv", "ConvTranspose"])
def test_a_sound_layer_is_silent(tmp_path, op):
    outputs = {"MatMul": 32, "Gemm": 32, "Conv": 16, "ConvTranspose": 16}[op]
    bias = None if op == "MatMul" else np.ones(outputs)
    assert lint(Linear(op, bias=bias).save(tmp_path / "m.onnx")) == {}


@pytest.mark.parametrize(
    ("layer", "rule", "severity", "where"),
    [
        (Linear(zero_point=np.int8(3)), "zero-point", "error", "x_dq"),
        (Linear(zero_point=np.uint8(128)), "zero-point", "error", "x_dq"),
        (Linear(zero_point=np.uint8(0)), "uint8", "warning", "x_dq"),
        (Linear(scale=0.0), "scale-not-positive", "error", "x_dq"),
        (Linear(scale=-0.1), "scale-not-positive", "error", "x_dq"),
        (Linear(weight_scale=channel(0.0)), "scale-not-positive", "error", "w_dq"),
        (Linear(scale=1e-40), "scale-denormal", "error", "x_dq"),
        (Linear(weight_scale=channel(1e-40)), "scale-denormal", "error", "w_dq"),
        (Linear(scale=np.nan), "scale-not-finite", "error", "x_dq"),
        (Linear(scale=np.inf), "scale-not-finite", "error", "x_dq"),
        (Linear(zero_point=np.zeros(16, np.int8)), "activation-by-channel", "error", "x_dq"),
        (Linear(weight_scale=np.full(31, 0.03)), "scale-length", "error", "w_dq"),
        (Linear("MatMul", weight_axis=0), "weight-axis", "error", "layer"),
        (Linear("Gemm", weight_axis=0), "weight-axis", "error", "layer"),
        (Linear("Conv", weight_axis=1), "weight-axis", "error", "layer"),
        (Linear("ConvTranspose", weight_axis=0), "weight-axis", "error", "layer"),
    ],
)
def test_quantizers_that_tensorrt_cannot_use(tmp_path, layer, rule, severity, where):
    assert lint(layer.save(tmp_path / "m.onnx")) == {rule: (severity, (where,))}


def test_the_smallest_normal_scale_is_silent(tmp_path):
    smallest = float(np.finfo(F).tiny)
    assert lint(Linear(scale=smallest).save(tmp_path / "m.onnx")) == {}


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Gemm"])
@pytest.mark.parametrize(
    ("share", "rule"),
    [(0.4, None), (0.6, "bias-range-warning"), (0.99, "bias-range-warning"), (1.01, "bias-range-error")],
)
def test_biases_in_int32(tmp_path, op, share, rule):
    """A bias of `share` x (2^31 - 1) steps of 0.5 x 2^-30, where the other channels' need almost none."""
    outputs = 32 if op == "Gemm" else 16
    bias = np.zeros(outputs)
    bias[3] = -share * (2**31 - 1) * 0.5 * 2.0**-30
    layer = Linear(op, scale=0.5, weight_scale=channel(2.0**-30, outputs, 3), bias=bias)
    severity = rule.split("-")[-1] if rule else ""
    assert lint(layer.save(tmp_path / "m.onnx")) == ({rule: (severity, ("layer",))} if rule else {})


def test_the_published_bias_overflow(tmp_path):
    """Recipe R16: steps 0.5 and 7.843e-10, bias 5: 1.28e10 steps."""
    layer = Linear("Gemm", scale=0.5, weight_scale=np.full(32, 7.843e-10), bias=np.full(32, 5.0))
    assert list(lint(layer.save(tmp_path / "m.onnx"))) == ["bias-range-error"]


@pytest.mark.parametrize(("code", "rule"), [(np.int8, "bias-range-error"), (ml_dtypes.float8_e4m3fn, None)])
def test_a_bias_that_a_following_add_brings(tmp_path, code, rule):
    """The same numbers in an Add behind a MatMul; FP8 kernels have no integers that it could leave."""
    constants = {"w": np.ones((16, 32), F), "b": np.full(32, 5.0, F), "x_s": F(0.5), "w_s": F(7.843e-10)}
    constants |= {"x_z": np.zeros((), code), "w_z": np.zeros((), code)}
    nodes = [*pair("x", "x"), *pair("w", "w"), helper.make_node("MatMul", ["x_d", "w_d"], ["p"], "layer")]
    path = build(
        tmp_path / "m.onnx", [*nodes, helper.make_node("Add", ["p", "b"], ["y"])], constants, [4, 16]
    )
    assert lint(path) == ({rule: ("error", ("layer",))} if rule else {})


def test_biases_as_codes(tmp_path):
    _, qdq = quantized_by_ort(tmp_path, "cnn", per_channel=True, symmetric=True)
    found = lint(qdq)
    assert list(found) == ["bias-codes"]
    assert set(found["bias-codes"][1]) == {
        "b1_DequantizeLinear",
        "b2_DequantizeLinear",
        "fb_DequantizeLinear",
    }


SQUARE = {"w": np.eye(4, dtype=F), "w_s": np.full(4, 0.01, F), "w_z": np.zeros(4, np.int8)}


def steps(**scales):
    found = dict(SQUARE)
    for name, scale in scales.items():
        found |= {f"{name}_s": np.asarray(scale, F), f"{name}_z": np.zeros(np.shape(scale), np.int8)}
    return found


def residual(path, *, skip, straight):
    """x + f(x): `skip` and `straight` say whether each of the Add's inputs is quantized."""
    nodes = [*pair("x", "x"), *pair("w", "w", 1), helper.make_node("MatMul", ["x_d", "w_d"], ["f"], "f")]
    nodes += pair("f", "f") if straight else []
    names = ["x_d" if skip else "x", "f_d" if straight else "f"]
    return build(path, [*nodes, helper.make_node("Add", names, ["y"], "add")], steps(x=0.1, f=0.1), [2, 4])


@pytest.mark.parametrize(
    ("skip", "straight", "found"),
    [
        (True, True, {}),
        (False, False, {}),
        (True, False, {}),  # the kernel of f takes the Add in: what TensorRT advises
        (False, True, {"one-sided-add": ("warning", ("add",))}),
    ],
)
def test_residual_adds(tmp_path, skip, straight, found):
    assert lint(residual(tmp_path / "m.onnx", skip=skip, straight=straight)) == found


@pytest.mark.parametrize(
    ("a", "b", "rule"), [(0.1, 0.1, None), (0.1, 0.2, "concat-scales"), (0.1, None, "concat-scales")]
)
def test_concats(tmp_path, a, b, rule):
    second = pair("r", "b") if b else []
    nodes = [*pair("x", "a"), helper.make_node("Relu", ["x"], ["r"], "relu"), *second]
    nodes.append(helper.make_node("Concat", ["a_d", "b_d" if b else "r"], ["y"], "cat", axis=1))
    found = lint(build(tmp_path / "m.onnx", nodes, steps(a=a, b=b or 0.1), [2, 4]))
    assert found == ({rule: ("warning", ("cat",))} if rule else {})


@pytest.mark.parametrize(("second", "rule"), [(0.1, None), (0.15, "double-quantization")])
@pytest.mark.parametrize("between", ["", "Transpose"])
def test_quantizing_twice(tmp_path, second, rule, between):
    """The same steps twice change nothing, and ONNX Runtime writes them behind every Reshape."""
    nodes = pair("x", "a")
    if between:
        nodes.append(helper.make_node(between, ["a_d"], ["t"], "t"))
    nodes += [*pair("t" if between else "a_d", "b"), helper.make_node("Relu", ["b_d"], ["y"], "relu")]
    found = lint(build(tmp_path / "m.onnx", nodes, steps(a=0.1, b=second), [2, 4]))
    assert found == ({rule: ("warning", ("b_dq",))} if rule else {})


@pytest.mark.parametrize(
    ("x", "w", "rule"), [(True, True, None), (True, False, "half-quantized"), (False, True, None)]
)
def test_half_quantized_layers(tmp_path, x, w, rule):
    """A quantized weight alone is usual (weight-only); an activation alone only loses."""
    nodes = [*(pair("x", "x") if x else []), *(pair("w", "w", 1) if w else [])]
    names = ["x_d" if x else "x", "w_d" if w else "w"]
    nodes += [helper.make_node("MatMul", names, ["m"], "layer"), *pair("m", "m")]
    nodes.append(helper.make_node("Relu", ["m_d"], ["y"], "relu"))
    found = lint(build(tmp_path / "m.onnx", nodes, steps(x=0.1, m=0.1), [2, 4]))
    assert found == ({rule: ("warning", ("layer",))} if rule else {})


@pytest.mark.parametrize(("on_shape", "rule"), [(True, "shape-path"), (False, None)])
def test_shape_arithmetic(tmp_path, on_shape, rule):
    """Half the width of x, as a float, is what x is expanded to."""
    scaled = [*pair("half", "h")] if on_shape else []
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], "shape"),
        helper.make_node("Cast", ["shape"], ["floats"], "floats", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "one"], ["half"], "half"),
        *scaled,
        helper.make_node("Cast", ["h_d" if on_shape else "half"], ["sizes"], "sizes", to=TensorProto.INT64),
        *pair("x", "x"),
        helper.make_node("Expand", ["x_d", "sizes"], ["y"], "expand"),
    ]
    constants = steps(x=0.1, h=0.1) | {"one": np.ones(1, F)}
    found = lint(build(tmp_path / "m.onnx", nodes, constants, [2, 4]))
    assert found == ({rule: ("error", ("h_dq",))} if rule else {})


def test_a_model_without_quantizers_is_silent(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "layer")]
    assert lint(build(tmp_path / "m.onnx", nodes, SQUARE, [2, 4])) == {}
