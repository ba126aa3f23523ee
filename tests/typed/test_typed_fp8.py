"""FP8 (E4M3): codes and scales against NumPy with the published value set, and through the emulation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.errors import TableError
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.typed.apply import TypedModel, apply_formats

E4M3 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((24, 16)).astype(np.float32) * np.linspace(0.1, 3, 16, dtype=np.float32)
SCALE = np.float32(0.01)


def matmul(opset: int = 13) -> Model:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 24])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9))


def typed(base: str = "fp32") -> TypedModel:
    return apply_formats(matmul(), {"product": "fp8"}, base=base, scales={"fp8": {"x": float(SCALE)}})


def fake(values: np.ndarray, scale: np.ndarray | np.float32) -> np.ndarray:
    """E4M3 as OCP OFP8 defines it, saturating: the nearest of its values, at most 448."""
    codes = np.clip(values / scale, -448, 448).astype(E4M3)
    return codes.astype(np.float32) * scale


def run(model: TypedModel, x: np.ndarray) -> np.ndarray:
    emulation = emulate(Model("typed", model.proto, model.weights, ""))
    return Session(emulation.proto, emulation.weights).run({"x": x})["y"]


def test_the_graph_says_what_tensorrt_reads() -> None:
    proto = typed().proto
    assert {o.version for o in proto.opset_import} == {19}
    pairs = [n.op_type for n in proto.graph.node]
    assert pairs.count("QuantizeLinear") == 1
    assert pairs.count("DequantizeLinear") == 2
    zeros = [t for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FN]
    assert len(zeros) >= 2  # the activation's zero point and the weight's, which say the codes' type
    assert typed().formats == {"product": "fp8"}


def test_the_emulation_is_e4m3_by_the_definition() -> None:
    x = RNG.standard_normal((5, 24)).astype(np.float32)
    scale = np.abs(WEIGHT).max(axis=0) / np.float32(448)
    wanted = fake(x, SCALE).astype(np.float64) @ fake(WEIGHT, scale).astype(np.float64)
    np.testing.assert_allclose(run(typed(), x), wanted, rtol=1e-5, atol=1e-5)


def test_values_beyond_the_range_saturate() -> None:
    x = np.full((1, 24), 1e3, np.float32)
    wanted = fake(x, SCALE).astype(np.float64) @ fake(WEIGHT, np.abs(WEIGHT).max(axis=0) / np.float32(448))
    np.testing.assert_allclose(run(typed(), x), wanted, rtol=1e-5)
    assert np.isfinite(run(typed(), x)).all()


def test_fp8_over_fp16_rounds_the_product_to_fp16() -> None:
    x = RNG.standard_normal((3, 24)).astype(np.float32)
    y = run(typed("fp16"), x)
    np.testing.assert_array_equal(y, y.astype(np.float16).astype(np.float32))


def test_a_missing_scale_is_named() -> None:
    with pytest.raises(TableError, match="no usable fp8 scale for tensor 'x'"):
        apply_formats(matmul(), {"product": "fp8"}, scales={})
