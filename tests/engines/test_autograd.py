"""Errors carried to outputs by gradients: closed forms, differences, and graphs that have none."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.engines.autograd import Autograd, has_torch
from diag.errors import EngineError
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto

needs_torch = pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")

FLOAT = TensorProto.FLOAT
X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
A = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((5, 3)).astype(np.float32)


def model_of(nodes: list, opset: int = 17, **constants: np.ndarray) -> Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


def autograd(model: Model, *tensors: str) -> Autograd:
    return Autograd(model, shapes.infer(model), {"x": X}, tensors)


LINEAR = [
    helper.make_node("MatMul", ["x", "A"], ["h"], name="first"),
    helper.make_node("MatMul", ["h", "B"], ["y"], name="second"),
]


@needs_torch
def test_a_linear_model_carries_an_error_exactly() -> None:
    error = np.random.default_rng(5).standard_normal((2, 5)).astype(np.float32)
    direction = np.random.default_rng(6).standard_normal((2, 3)).astype(np.float32)
    graph = autograd(model_of(LINEAR, A=A, B=B), "h", "y")
    products = graph.products({"h": error, "y": direction}, {"y": direction})
    assert products["h"] == pytest.approx(float(np.vdot(direction, error @ B)), rel=1e-5)
    assert products["y"] == pytest.approx(float((direction**2).sum()), rel=1e-5)
    np.testing.assert_allclose(graph.reference["y"], X @ A @ B, rtol=1e-5)


@needs_torch
def test_a_curved_model_is_followed_to_first_order() -> None:
    nodes = [
        LINEAR[0],
        helper.make_node("Softmax", ["h"], ["p"], name="softmax"),
        helper.make_node("MatMul", ["p", "B"], ["y"], name="second"),
    ]
    graph = autograd(model_of(nodes, A=A, B=B), "h")
    error = 1e-4 * np.random.default_rng(5).standard_normal((2, 5))
    h = (X @ A).astype(np.float64)

    def output(logits: np.ndarray) -> np.ndarray:
        return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True) @ B

    direction = np.ones((2, 3), np.float32)
    moved = float((output(h + error) - output(h)).sum())
    found = graph.products({"h": error.astype(np.float32)}, {"y": direction})
    assert found["h"] == pytest.approx(moved, rel=1e-2)


@needs_torch
def test_what_stands_before_the_tensors_needs_no_gradient() -> None:
    """Masks, indices and operators without a derivative come from ONNX Runtime."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["xt"], name="transpose"),
        helper.make_node("MatMul", ["x", "xt"], ["square"], name="gram"),
        helper.make_node("Det", ["square"], ["d"], name="unknown"),
        helper.make_node("Mul", ["x", "d"], ["h"], name="scaled"),
        helper.make_node("Greater", ["x", "zero"], ["positive"], name="mask"),
        helper.make_node("Where", ["positive", "h", "zero"], ["y"], name="masked"),
    ]
    model = model_of(nodes, zero=np.zeros((), np.float32))
    graph = autograd(model, "h")
    ones = np.ones((2, 4), np.float32)
    assert graph.products({"h": ones}, {"y": ones})["h"] == pytest.approx(np.count_nonzero(X > 0))


@needs_torch
def test_an_operator_without_a_gradient_is_named() -> None:
    nodes = [LINEAR[0], helper.make_node("CumSum", ["h", "axis"], ["y"], name="sum")]
    with pytest.raises(EngineError, match="no gradient of operator CumSum is known"):
        autograd(model_of(nodes, A=A, axis=np.int64(1)), "h")


@needs_torch
def test_an_operator_that_means_something_else_is_refused() -> None:
    """Below opset 13 Softmax runs over all axes from the first on; PyTorch's over one."""
    nodes = [
        LINEAR[0],
        helper.make_node("Unsqueeze", ["h"], ["wide"], name="wide", axes=[1]),
        helper.make_node("Concat", ["wide", "wide"], ["pair"], name="pair", axis=1),
        helper.make_node("Softmax", ["pair"], ["y"], name="softmax"),
    ]
    with pytest.raises(EngineError, match="PyTorch computes output 'y' otherwise"):
        autograd(model_of(nodes, opset=12, A=A), "h")


@pytest.mark.skipif(has_torch(), reason="PyTorch is installed")
def test_without_pytorch_the_line_that_installs_it_is_given() -> None:
    with pytest.raises(EngineError, match="gradients need PyTorch") as caught:
        autograd(model_of(LINEAR, A=A, B=B), "h")
    assert "trtdiag[torch]" in caught.value.hint
