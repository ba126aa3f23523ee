"""TF32 in a plan: 10 bits of mantissa at both operands of a product, FP32 in the file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from block_tools import emulated, normal, product, typed, whole

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.engines.tf32 import emulate_tf32
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto, load_model
from diag.numerics.formats import FORMATS, round_to
from diag.typed.apply import apply_formats
from diag.typed.types import complete

WEIGHT = normal(64, 16)
X = normal(5, 64, seed=1)


def chopped(values: np.ndarray) -> np.ndarray:
    """To nearest at 11 significant bits, in float64 by scaling: the definition, ties to even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2**11) / 2**11, exponent)


def test_the_format_keeps_eleven_significant_bits() -> None:
    values = normal(10_000)
    assert np.array_equal(round_to(values, FORMATS["tf32"]), chopped(values).astype(np.float32))
    assert FORMATS["tf32"].unit_roundoff == 2.0**-11


def test_the_product_is_that_of_rounded_operands() -> None:
    model = typed(product(WEIGHT), "tf32")
    assert model.formats == {"product": "tf32"}
    wanted = chopped(X) @ chopped(WEIGHT)
    np.testing.assert_allclose(emulated(model, {"x": X})["y"], wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(emulated(model, {"x": X})["y"] - X @ WEIGHT).max() > 1e-4


def test_the_file_is_the_fp32_model_and_says_so() -> None:
    model = typed(product(WEIGHT), "tf32")
    (node,) = whole(model).graph.node
    assert (node.op_type, list(node.input)) == ("MatMul", ["x", "w"])
    assert [(m.key, m.value) for m in node.metadata_props] == [("trtdiag.format", "tf32")]
    onnx.checker.check_model(whole(model), full_check=True)
    assert "ONNX has no such type" in model.notes[0]


def test_a_saved_file_is_emulated_alike(tmp_path: object) -> None:
    path = f"{tmp_path}/typed.onnx"
    onnx.save(whole(typed(product(WEIGHT), "tf32")), path)
    emulation = emulate(load_model(path))
    got = Session(emulation.proto, emulation.weights).run({"x": X})["y"]
    assert np.array_equal(got, emulated(typed(product(WEIGHT), "tf32"), {"x": X})["y"])


def test_it_is_the_arithmetic_of_the_engine_question() -> None:
    model = product(WEIGHT)
    whole_model = emulate_tf32(model, complete(shapes.infer(model), model))
    wanted = Session(whole_model.proto, whole_model.weights).run({"x": X})["y"]
    assert np.array_equal(emulated(typed(model, "tf32"), {"x": X})["y"], wanted)


def test_other_layers_stay_exact() -> None:
    proto = whole(typed(product(WEIGHT), "fp32"))
    proto.graph.node.append(onnx.helper.make_node("MatMul", ["x", "w"], ["z"], name="second"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    got = emulated(apply_formats(from_proto(proto), {"product": "tf32", "second": "fp32"}), {"x": X})
    plain = Session(proto, {}).run({"x": X})
    assert np.array_equal(got["z"], plain["z"])
    assert not np.array_equal(got["y"], plain["y"])


@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
def test_foreign_fp8_quantizers_are_read(fmt: str) -> None:
    """A model that brings Q/DQ in E5M2 or E4M3 is computed with that value set."""
    elem = {"e5m2": onnx.TensorProto.FLOAT8E5M2, "e4m3": onnx.TensorProto.FLOAT8E4M3FN}[fmt]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem)
    scale = np.float32(0.0078125)
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequantize"),
        onnx.helper.make_node("DequantizeLinear", ["wq", "s", "z"], ["w"], name="weights"),
        onnx.helper.make_node("MatMul", ["d", "w"], ["y"], name="product"),
    ]
    codes = (WEIGHT / scale).astype(dtype)
    constants = {"s": scale, "z": np.zeros((), dtype), "wq": codes}
    graph = onnx.helper.make_graph(
        nodes,
        "foreign",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 64])],
        [onnx.helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9)
    model = from_proto(proto)
    emulation = emulate(Model("foreign", model.proto, model.weights, ""))
    got = Session(emulation.proto, emulation.weights).run({"x": X})["y"]
    x = (X / scale).astype(dtype).astype(np.float64) * scale
    np.testing.assert_allclose(got, x @ (codes.astype(np.float64) * scale), rtol=1e-5, atol=1e-5)
