"""Blocks: weights and activations against the definitions, through the typed model and its emulation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from block_tools import emulated, int4, mxfp8, normal, nvfp4, product, typed, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto

from diag.engines.onnxruntime import Session
from diag.errors import PlanError, TableError
from diag.lint.quantizers import check_quantizers
from diag.model import shapes
from diag.model.load import from_proto
from diag.numerics.blocks import dequantize_blocks, mxfp8_blocks, nvfp4_blocks
from diag.typed.apply import apply_formats
from diag.typed.brought import find_quantizers

SPREAD = np.exp(normal(256, seed=5) * 3)
"""Channels of very different size: a block sees what a tensor's scale hides."""
WEIGHT = normal(256, 24) * SPREAD[:, None]
X = normal(6, 256, seed=1) * SPREAD[::-1]

blocks_of_floats = hnp.arrays(
    np.float32, (3, 64), elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False)
)


def same(result: np.ndarray, wanted: np.ndarray) -> None:
    """Equal but for the order of float32 sums."""
    np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=2e-6 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_int4_weights_are_those_of_the_definition(size: int) -> None:
    model = typed(product(WEIGHT), "int4", block_size=size)
    same(emulated(model, {"x": X})["y"], X.astype(np.float64) @ int4(WEIGHT, 0, size))


@pytest.mark.parametrize(("depth", "size"), [(256, 128), (384, 128), (576, 64), (96, 32)])
def test_the_largest_block_that_divides_is_taken(depth: int, size: int) -> None:
    (node,) = [n for n in typed(product(normal(depth, 8)), "int4").proto.graph.node if n.op_type[0] == "D"]
    assert {a.name: a.i for a in node.attribute} == {"axis": 0, "block_size": size}


def test_a_transposed_weight_has_its_blocks_along_the_other_axis() -> None:
    turned = np.ascontiguousarray(WEIGHT.T)
    model = typed(product(turned, transB=1), "int4")
    same(emulated(model, {"x": X})["y"], X.astype(np.float64) @ int4(turned, 1, 128).T)


@pytest.mark.parametrize(("base", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_int4_scales_are_kept_in_the_base_format(base: str, dtype: type) -> None:
    weight, x = normal(256, 24), normal(6, 256, seed=1)
    model = typed(product(weight), "int4", base=base)
    (scale,) = [t for t in model.proto.graph.initializer if t.name == "w/int4/scale"]
    assert onnx.helper.tensor_dtype_to_np_dtype(scale.data_type) == np.dtype(dtype)
    assert list(scale.dims) == [2, 24]
    weights = int4(weight, 0, 128, dtype).astype(dtype).astype(np.float64)
    wanted = x.astype(dtype).astype(np.float64) @ weights
    got = emulated(model, {"x": x})["y"]
    one_step = 2 * float(ml_dtypes.finfo(dtype).eps) * np.abs(wanted).max()
    assert np.abs(got - wanted).max() <= one_step


def test_the_int4_file_is_onnx_and_onnx_runtime_runs_it() -> None:
    model = whole(typed(product(WEIGHT), "int4"))
    onnx.checker.check_model(model, full_check=True)
    assert [t.data_type for t in model.graph.initializer if t.name == "w/int4"] == [TensorProto.INT4]
    assert {o.domain: o.version for o in model.opset_import} == {"": 21}
    options = ort.SessionOptions()
    # Otherwise ONNX Runtime makes a MatMulNBits of it, and quantizes the activation to INT8 for it.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    same(session.run(None, {"x": X})[0], X.astype(np.float64) @ int4(WEIGHT, 0, 128))


@pytest.mark.parametrize("optimised", [False, True])
def test_a_session_runs_int4_weights_as_they_are(optimised: bool) -> None:
    """Two values lie in a byte; and ONNX Runtime itself would choose an INT8 activation, here 6 % off."""
    model = typed(product(WEIGHT), "int4")
    session = Session(model.proto, model.weights, optimised=optimised)
    same(session.run({"x": X})["y"], X.astype(np.float64) @ int4(WEIGHT, 0, 128))


def test_int4_takes_an_eighth_of_the_bytes_and_a_scale_for_each_block() -> None:
    big = normal(512, 512)
    size = len(whole(typed(product(big), "int4")).SerializeToString())
    assert size == pytest.approx(big.nbytes / 8 + big.nbytes / 128, rel=0.01)


def test_mxfp8_is_the_definition_on_both_operands() -> None:
    model = typed(product(WEIGHT), "mxfp8")
    same(emulated(model, {"x": X})["y"], mxfp8(X, 1).astype(np.float64) @ mxfp8(WEIGHT, 0))


def test_nvfp4_is_the_definition_on_both_operands() -> None:
    model = typed(product(WEIGHT), "nvfp4", X)
    same(emulated(model, {"x": X})["y"], nvfp4(X, 1).astype(np.float64) @ nvfp4(WEIGHT, 0))


def test_nvfp4_saturates_what_calibration_did_not_see() -> None:
    x, seen = normal(6, 256), normal(6, 256) / 8
    got = emulated(typed(product(WEIGHT), "nvfp4", seen), {"x": x})["y"]
    same(got, nvfp4(x, 1, float(np.abs(seen).max())).astype(np.float64) @ nvfp4(WEIGHT, 0))
    assert np.abs(nvfp4(x, 1, float(np.abs(seen).max()))).max() <= np.abs(seen).max() * 1.0001


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("opset", [11, 17, 20])
def test_three_dimensions_and_any_opset(fmt: str, opset: int) -> None:
    x = X.reshape(2, 3, 256)
    model = typed(product(WEIGHT, ("b", "s"), opset), fmt, x)
    definition = mxfp8 if fmt == "mxfp8" else nvfp4
    same(emulated(model, {"x": x})["y"], definition(x, 2).astype(np.float64) @ definition(WEIGHT, 0))


@settings(max_examples=60, deadline=None)
@given(blocks_of_floats)
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_the_emulated_activation_is_exact(fmt: str, x: np.ndarray) -> None:
    """Through an identity matrix, so that the quantized activation itself comes out."""
    identity = np.eye(64, dtype=np.float32)  # exact in both formats
    got = emulated(typed(product(identity), fmt, np.maximum(np.abs(x), 1e-3)), {"x": x})["y"]
    absmax = float(np.maximum(np.abs(x), 1e-3).max())
    wanted = mxfp8(x, 1) if fmt == "mxfp8" else nvfp4(x, 1, absmax)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_what_is_not_finite_is_not_hidden(fmt: str) -> None:
    x = X.copy()
    x[0, 3] = np.nan
    got = emulated(typed(product(WEIGHT), fmt, X), {"x": x})["y"]
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1:]).all()


@given(blocks_of_floats)
def test_weights_in_mxfp8_are_the_definition(values: np.ndarray) -> None:
    blocks = mxfp8_blocks(values, 1)
    decoded = dequantize_blocks(blocks.codes, blocks.scales.astype(np.float32), 1, 32)
    np.testing.assert_array_equal(decoded, mxfp8(values, 1))


@given(blocks_of_floats)
def test_weights_in_nvfp4_are_the_definition(values: np.ndarray) -> None:
    blocks = nvfp4_blocks(values, 1)
    steps = blocks.scales.astype(np.float32) * np.float32(blocks.tensor_scale)
    decoded = dequantize_blocks(blocks.codes, steps, 1, 16)
    wanted = nvfp4(values, 1) if values.any() else np.zeros_like(values)
    np.testing.assert_array_equal(decoded, wanted)


def test_a_short_last_block_is_read() -> None:
    codes = np.ones((1, 5), np.int8)
    steps = np.array([[1, 10, 100]], np.float32)
    assert dequantize_blocks(codes, steps, 1, 2).tolist() == [[1, 1, 10, 10, 100]]


def test_two_layers_of_one_tensor_share_its_quantizer() -> None:
    proto = whole(typed(product(WEIGHT), "fp32"))
    proto.graph.node.append(onnx.helper.make_node("MatMul", ["x", "w"], ["z"], name="second"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    found = [n.op_type for n in typed(from_proto(proto), "mxfp8").proto.graph.node]
    assert found.count("TRT_MXFP8DynamicQuantize") == 1
    assert found.count("TRT_MXFP8DequantizeLinear") == 2


def test_a_block_that_does_not_divide_is_refused_when_it_was_asked_for() -> None:
    with pytest.raises(PlanError, match="blocks of 128 do not divide the 96 elements that layer 'product'"):
        typed(product(normal(96, 8)), "int4", block_size=128)


@pytest.mark.parametrize("fmt", ["int4", "mxfp8", "nvfp4"])
def test_a_reduction_without_blocks_stays_in_the_base_format_and_is_named(fmt: str) -> None:
    model = typed(product(normal(100, 8)), fmt)
    assert model.formats == {"product": "fp32"}
    (note,) = model.notes
    assert note == (
        f"1 layer(s) are not quantized to {fmt.upper()}: a reduction over 100 elements does not divide into "
        "blocks, first product"
    )
    assert [n.op_type for n in model.proto.graph.node] == ["MatMul"]


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_four_dimensions_are_beyond_tensorrt(fmt: str) -> None:
    model = typed(product(WEIGHT, ("a", "b", "c")), fmt)
    assert model.formats == {"product": "fp32"}
    assert "two or three dimensions" in model.notes[0]
    assert typed(product(WEIGHT, ("a", "b", "c")), "int4").formats == {"product": "int4"}  # weights only


def test_nvfp4_without_a_scale_is_refused_and_mxfp8_needs_none() -> None:
    with pytest.raises(TableError, match="no usable scale for tensor 'x'"):
        apply_formats(product(WEIGHT), {"product": "nvfp4"})
    assert apply_formats(product(WEIGHT), {"product": "mxfp8"}).formats == {"product": "mxfp8"}


def test_the_files_say_what_tensorrt_reads() -> None:
    mx, nv = typed(product(WEIGHT), "mxfp8"), typed(product(WEIGHT), "nvfp4", X)
    kinds = {t.name: t.data_type for t in mx.proto.graph.initializer}
    assert kinds == {"w/mxfp8": TensorProto.FLOAT8E4M3FN, "w/mxfp8/scale": TensorProto.UINT8}
    kinds = {t.name: t.data_type for t in nv.proto.graph.initializer}
    assert kinds == {
        "w/nvfp4": TensorProto.FLOAT4E2M1,
        "w/nvfp4/scale": TensorProto.FLOAT8E4M3FN,
        "w/nvfp4/tensor_scale": TensorProto.FLOAT,
        "x/nvfp4/tensor_scale": TensorProto.FLOAT,
    }
    for model in (mx, nv):
        assert {o.domain for o in model.proto.opset_import} == {"", "trt"}
        assert any("ONNX Runtime does not" in note for note in model.notes)
        onnx.checker.check_model(whole(model), full_check=True)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_an_axis_whose_length_the_graph_does_not_say_is_given_one(fmt: str) -> None:
    """TensorRT must know it when it builds; exporters leave it open behind a Reshape to computed shapes."""
    proto = whole(typed(product(WEIGHT, ("b", "s")), "fp32"))
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "k"
    model = typed(from_proto(proto), fmt, X)
    (extent,) = [n for n in model.proto.graph.node if n.op_type == "Reshape"]
    (shape,) = [t for t in model.proto.graph.initializer if t.name == extent.input[1]]
    assert onnx.numpy_helper.to_array(shape).tolist() == [0, 0, 256]
    plain = emulated(typed(product(WEIGHT, ("b", "s")), fmt, X), {"x": X.reshape(2, 3, 256)})["y"]
    np.testing.assert_array_equal(emulated(model, {"x": X.reshape(2, 3, 256)})["y"], plain)


@pytest.mark.parametrize("fmt", ["int4", "mxfp8", "nvfp4"])
def test_the_files_pass_the_lint_for_quantizers(fmt: str) -> None:
    model = from_proto(whole(typed(product(WEIGHT), fmt, X)))
    found = find_quantizers(model)
    assert len(found) == {"int4": 1, "mxfp8": 0, "nvfp4": 4}[fmt]
    assert list(check_quantizers(model, found, shapes.infer(model))) == []
