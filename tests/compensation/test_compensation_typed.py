"""What a compensated table asks of the typed model: smaller weight steps, corrected outputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.numerics.formats import FORMATS, dequantize, quantize
from diag.typed.apply import apply_formats

WEIGHT = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
SCALE = 0.02


def linear_model() -> Model:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="linear"),
        helper.make_node("Relu", ["m"], ["y"], name="relu"),
    ]
    shapes = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [5, c]) for n, c in (("x", 8), ("y", 6))]
    graph = helper.make_graph(nodes, "g", shapes[:1], shapes[1:], [numpy_helper.from_array(WEIGHT, "w")])
    return Model("m", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), {}, "")


def typed_outputs(model: Model, base: str = "fp32", **extra: object) -> np.ndarray:
    typed = apply_formats(
        model, {"linear": "int8", "relu": base}, base=base, scales={"int8": {"x": SCALE}}, **extra
    )
    onnx.checker.check_model(typed.proto, full_check=True)
    emulation = emulate(typed.model)
    return Session(emulation.proto, emulation.weights).run({"x": inputs()})["y"]


def inputs() -> np.ndarray:
    return np.random.default_rng(2).uniform(-2, 2, (5, 8)).astype(np.float32)


def expected(ratio: np.ndarray | float = 1.0, correction: np.ndarray | float = 0.0) -> np.ndarray:
    """The arithmetic written out: codes of both operands, their product, the correction, Relu."""
    steps = (np.abs(WEIGHT).max(axis=0) * ratio / 127).astype(np.float32)
    weight = dequantize(quantize(WEIGHT, steps, FORMATS["int8"], 1), steps, 1)
    rounded = np.clip(np.rint(inputs() / np.float32(SCALE)), -128, 127) * np.float32(SCALE)
    return np.maximum(rounded @ weight + correction, 0)


def test_steps_of_weights_are_multiplied_by_the_ratios() -> None:
    ratio = np.array([1, 0.9, 0.5, 0.7, 1, 0.8], np.float32)
    found = typed_outputs(linear_model(), weight_ratios={"w": ratio})
    np.testing.assert_allclose(found, expected(ratio), rtol=1e-5, atol=1e-6)
    assert np.abs(found - expected()).max() > 1e-3


def test_corrections_are_added_to_the_layer_before_what_follows() -> None:
    correction = np.array([0.5, -0.5, 0, 0.25, 0, -0.125], np.float32)
    found = typed_outputs(linear_model(), corrections={"linear": correction})
    np.testing.assert_allclose(found, expected(correction=correction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", ["fp16", "bf16"])
def test_corrections_are_typed_in_the_base_format(base: str) -> None:
    correction = np.array([0.5, -0.5, 0, 0.25, 0, -0.125], np.float32)
    found = typed_outputs(linear_model(), base, corrections={"linear": correction})
    np.testing.assert_allclose(found, expected(correction=correction), rtol=0.03, atol=0.06)


def test_a_layer_without_correction_keeps_its_nodes() -> None:
    model = linear_model()
    typed = apply_formats(
        model, {"linear": "int8", "relu": "fp32"}, scales={"int8": {"x": SCALE}}, corrections={}
    )
    assert not [n for n in typed.proto.graph.node if n.name.startswith("trtdiag/bias")]


def test_corrections_of_a_convolution_are_along_its_channels() -> None:
    kernel = np.random.default_rng(3).normal(size=(4, 3, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "k"], ["y"], name="conv", pads=[1, 1, 1, 1])
    shapes = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, c, 6, 6]) for n, c in (("x", 3), ("y", 4))
    ]
    graph = helper.make_graph([node], "g", shapes[:1], shapes[1:], [numpy_helper.from_array(kernel, "k")])
    model = Model("m", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), {}, "")
    feed = {"x": np.random.default_rng(4).normal(size=(1, 3, 6, 6)).astype(np.float32)}

    def run(corrections: dict[str, np.ndarray]) -> np.ndarray:
        typed = apply_formats(model, {"conv": "int8"}, scales={"int8": {"x": 0.03}}, corrections=corrections)
        emulation = emulate(typed.model)
        return Session(emulation.proto, emulation.weights).run(feed)["y"]

    correction = np.array([1, -2, 3, 0], np.float32)
    np.testing.assert_allclose(
        run({"conv": correction}) - run({}),
        np.broadcast_to(correction[:, None, None], (1, 4, 6, 6)),
        atol=1e-5,
    )
