"""INT8 and FP8 in one plan, with floats of three widths: exact by NumPy, alike in ONNX Runtime, compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from diag.engines.build import BuildOptions, build_rtx
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.errors import TableError
from diag.kernels.nodes import MULTIPLYING_OPS, built_types, map_nodes
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.model.save import embedded
from diag.pipeline.calibrate.tables import calibrate_model
from diag.pipeline.compare.job import compare
from diag.pipeline.prepare import plan_on, read_scales
from diag.pipeline.settings import CompareSettings
from diag.plan.schema import Plan, plan_from_mapping
from diag.progress import Silent
from diag.typed.apply import TypedModel, apply_formats
from fixtures.graphs import Dims, bert

Array = NDArray[np.float32]
RNG = np.random.default_rng(3)
X = RNG.standard_normal((8, 32)).astype(np.float32)
WEIGHTS = {name: RNG.standard_normal((32, 32)).astype(np.float32) for name in ("wi", "wf", "wh", "wb", "wo")}


def branches() -> Model:
    """One tensor read in INT8, FP8, FP16, BF16 and FP32; their sum through an INT8 product."""
    nodes = [helper.make_node("MatMul", ["x", f"w{c}"], [f"y{c}"], name=f"op_{c}") for c in "ifhb"]
    nodes += [
        helper.make_node("Relu", ["x"], ["yr"], name="relu"),
        helper.make_node("Sum", ["yi", "yf", "yh", "yb", "yr"], ["s"], name="sum"),
        helper.make_node("MatMul", ["s", "wo"], ["y"], name="op_o"),
    ]
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 32])],
        [numpy_helper.from_array(v, n) for n, v in WEIGHTS.items()],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


FORMATS = {
    "op_i": "int8",
    "op_f": "fp8",
    "op_h": "fp16",
    "op_b": "bf16",
    "relu": "fp32",
    "sum": "fp32",
    "op_o": "int8",
}


def int8(values: Array, scale: Array) -> Array:
    return np.clip(np.round(values / scale), -128, 127).astype(np.float32) * scale


def fp8(values: Array, scale: Array) -> Array:
    return np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def as_float(values: Array, dtype: object) -> Array:
    return values.astype(dtype).astype(np.float32)  # type: ignore[call-overload, no-any-return]


def by_hand(scale_s: np.float32) -> tuple[Array, Array]:
    """The sum and the output, each product in FP64 of operands as the formats hold them."""
    column = {n: np.abs(w).max(axis=0) for n, w in WEIGHTS.items()}
    peak = np.abs(X).max()
    yi = int8(X, np.float32(peak / 127)) @ int8(WEIGHTS["wi"], (column["wi"] / 127).astype(np.float32))
    yf = fp8(X, np.float32(peak / 448)) @ fp8(WEIGHTS["wf"], (column["wf"] / 448).astype(np.float32))
    yh = as_float(as_float(X, np.float16) @ as_float(WEIGHTS["wh"], np.float16), np.float16)
    bf16 = ml_dtypes.bfloat16
    yb = as_float(as_float(X, bf16) @ as_float(WEIGHTS["wb"], bf16), bf16)
    total = yi + yf + yh + yb + np.maximum(X, 0)
    return total, int8(total, scale_s) @ int8(WEIGHTS["wo"], (column["wo"] / 127).astype(np.float32))


def scales() -> dict[str, dict[str, float]]:
    peak = float(np.abs(X).max())
    return {"int8": {"x": peak / 127, "s": 0.5}, "fp8": {"x": peak / 448, "s": 9.0}}


def run(typed: TypedModel) -> Array:
    found = emulate(typed.model)
    return Session(found.proto, found.weights).run({"x": X})["y"]


def test_each_reader_has_a_quantizer_of_its_own() -> None:
    typed = apply_formats(branches(), FORMATS, scales=scales())
    proto = embedded(typed.proto, typed.weights)
    pairs = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x"]
    assert len(pairs) == 2
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    found = {constants[n.input[2]].dtype.name: float(constants[n.input[1]]) for n in pairs}
    peak = np.abs(X).max()
    assert found == {"int8": np.float32(peak / 127), "float8_e4m3fn": np.float32(peak / 448)}
    onnx.checker.check_model(proto, full_check=True)


def test_the_emulation_is_what_the_formats_say() -> None:
    _, wanted = by_hand(np.float32(0.5))
    # a value of the sum that lies on the border of two INT8 codes may fall to either side
    step = 0.5 * np.abs(WEIGHTS["wo"]).max()
    difference = np.abs(run(apply_formats(branches(), FORMATS, scales=scales())) - wanted)
    assert difference.max() < 2 * step
    assert np.median(difference) < 1e-3


def test_onnx_runtime_agrees_with_the_emulation() -> None:
    formats = FORMATS | {"op_h": "fp32", "op_b": "fp32"}  # its FP16 and BF16 are not the point here
    typed = apply_formats(branches(), formats, scales=scales())
    np.testing.assert_array_equal(Session(typed.proto, typed.weights).run({"x": X})["y"], run(typed))


def test_a_scale_that_only_the_other_format_has_is_missing() -> None:
    given = scales()
    del given["fp8"]["x"]
    with pytest.raises(TableError, match="no usable fp8 scale for tensor 'x'"):
        apply_formats(branches(), FORMATS, scales=given)


FIXED = Dims(hidden=64, heads=4, ffn=128, blocks=1, seq_len=16, batch=2, seq=16)


def mixed_plan() -> Plan:
    pins = [
        {"role": "ffn_down", "format": "fp8"},
        {"role": "attn_out_proj", "format": "bf16"},
        {"role": "qk_matmul", "format": "fp16"},
        {"role": "pv_matmul", "format": "fp16"},
    ]
    return plan_from_mapping({"schema": "trtdiag.plan/1", "default": "int8", "pins": pins})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    fixture = bert(FIXED)
    proto = ModelProto()
    proto.CopyFrom(fixture.model)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 2
    onnx.save(proto, folder / "model.onnx")
    np.savez(folder / "batch.npz", **fixture.batch(2))
    data, table = str(folder / "batch.npz"), str(folder / "table.json")
    calibrate_model(str(folder / "model.onnx"), data, table, None, Silent())
    return folder


def test_compare_with_a_mixed_plan(files: Path) -> None:
    from diag.plan.schema import write_plan

    write_plan(mixed_plan(), files / "plan.yaml")
    report = compare(
        CompareSettings(
            str(files / "model.onnx"),
            str(files / "batch.npz"),
            str(files / "out"),
            plan=str(files / "plan.yaml"),
            calibration=str(files / "table.json"),
        ),
        Silent(),
    )
    assert {layer.format for layer in report.layers} >= {"int8", "fp8", "fp16", "bf16"}
    assert all(output.metrics["sqnr_db"] > 15 for output in report.outputs)


@pytest.mark.rtx
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="the TensorRT-RTX wheel is not installed"
)
def test_tensorrt_rtx_builds_both(files: Path) -> None:
    planned = plan_on(str(files / "model.onnx"), mixed_plan())
    typed = planned.apply(read_scales(planned, str(files / "table.json")))
    path = files / "typed.onnx"
    onnx.save(embedded(typed.proto, typed.weights), path)
    result = build_rtx(path, options=BuildOptions(timeout_s=120))
    ops = {x.id: x.op_type for x in planned.model.layers if x.op_type in MULTIPLYING_OPS}
    built = built_types(map_nodes(result.kernels, ops), ops)
    products = {x.id for x in planned.model.layers if x.op_type == "MatMul"}
    wanted = {layer: typed.formats[layer] for layer in products}
    assert {layer: built[layer] for layer in products} == wanted
