"""Empty and constant tensors, channels of zeros: from calibration through conversion to the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.errors import NotEnoughEvidenceError, TableError
from diag.pipeline.calibrate.tables import CalibrateSettings, calibrate, convert_model
from diag.pipeline.compare.job import compare
from diag.pipeline.settings import CompareSettings
from diag.progress import Silent

RNG = np.random.default_rng(2)


def odd_model(folder: Path) -> str:
    """Products whose operands are zero throughout, one value throughout, and have channels of zeros."""
    weight = RNG.standard_normal((6, 6)).astype(np.float32)
    dead = weight.copy()
    dead[:, 2] = 0
    mask = np.ones(6, np.float32)
    mask[4] = 0
    constants = {"w": weight, "dead": dead, "mask": mask, "zero": np.float32(0), "one": np.float32(0.75)}
    nodes = [
        helper.make_node("Mul", ["x", "zero"], ["zeros"], name="zeros"),
        helper.make_node("Add", ["zeros", "one"], ["same"], name="same"),
        helper.make_node("Mul", ["x", "mask"], ["masked"], name="masked"),
        helper.make_node("MatMul", ["zeros", "w"], ["a"], name="of_zeros"),
        helper.make_node("MatMul", ["same", "w"], ["b"], name="of_a_constant"),
        helper.make_node("MatMul", ["masked", "dead"], ["c"], name="dead_channels"),
        helper.make_node("Sum", ["a", "b", "c"], ["y"], name="sum"),
    ]
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    path = folder / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


@pytest.fixture
def odd(tmp_path: Path) -> tuple[str, str, str]:
    np.savez(tmp_path / "batch.npz", x=RNG.standard_normal((8, 6)).astype(np.float32))
    model, data, table = odd_model(tmp_path), str(tmp_path / "batch.npz"), str(tmp_path / "table.json")
    calibrate(CalibrateSettings(model, data, table), Silent())
    return model, data, table


def test_the_table_says_what_is_odd(odd: tuple[str, str, str]) -> None:
    tensors = json.loads(Path(odd[2]).read_text())["tensors"]
    assert "zero" in tensors["zeros"]["flags"]
    assert "constant" in tensors["same"]["flags"]
    assert "zero_channels" in tensors["masked"]["flags"]
    assert tensors["same"]["absmax"] == 0.75


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile", "mse"])
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_every_scale_is_usable(method: str, fmt: str, odd: tuple[str, str, str], tmp_path: Path) -> None:
    model, _, table = odd
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"schema: trtdiag.plan/1\ndefault: {fmt}\nquantizer: {{method: {method}}}\n")
    out = tmp_path / "typed.onnx"
    convert_model(model, str(plan), None, table, str(out))
    proto = onnx.load(out)
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    scales = [values[n.input[1]] for n in proto.graph.node if n.op_type == "DequantizeLinear"]
    assert len(scales) == 5  # three activations, two weights
    assert all(np.isfinite(s).all() and (s > np.finfo(np.float32).tiny).all() for s in scales)


@pytest.mark.parametrize("fmt", ["int8", "fp8", "fp16"])
@pytest.mark.parametrize("placement", ["inputs", "fused"])
def test_compare_gives_numbers(fmt: str, placement: str, odd: tuple[str, str, str], tmp_path: Path) -> None:
    model, data, table = odd
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"schema: trtdiag.plan/1\ndefault: {fmt}\nplacement: {placement}\n")
    out = str(tmp_path / "out")
    report = compare(CompareSettings(model, data, out, plan=str(plan), calibration=table), Silent())
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["of_zeros"].accumulated["sqnr_db"] == np.inf  # zero times anything is kept exactly
    assert all(not np.isnan(v) for layer in report.layers for v in layer.accumulated.values())
    assert report.outputs[0].metrics["sqnr_db"] > 25
    assert not [f for f in report.findings if f.severity == "error"]


def test_an_empty_tensor_has_no_range_and_is_named(tmp_path: Path) -> None:
    """Batches without a row: nothing was ever measured."""
    np.savez(tmp_path / "batch.npz", x=np.zeros((0, 6), np.float32))
    model, table = odd_model(tmp_path), str(tmp_path / "table.json")
    found = calibrate(CalibrateSettings(model, str(tmp_path / "batch.npz"), table), Silent())
    assert all("empty" in tensor.flags and not tensor.elements for tensor in found.tensors.values())
    with pytest.raises(TableError, match=r"no element into 3 of 3 tensors .* first 'zeros'"):
        convert_model(model, None, "int8", table, str(tmp_path / "typed.onnx"))


@pytest.mark.parametrize("fmt", ["int8", "fp16"])
def test_nothing_compared_is_no_success(fmt: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "batch.npz", x=np.zeros((0, 6), np.float32))
    model, data = odd_model(tmp_path), str(tmp_path / "batch.npz")
    refused = TableError if fmt == "int8" else NotEnoughEvidenceError
    with pytest.raises(refused, match=r"no element into|nothing was compared"):
        compare(CompareSettings(model, data, str(tmp_path / "out"), format=fmt), Silent())


def test_an_empty_batch_among_others_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "0.npz", x=np.zeros((0, 6), np.float32))
    np.savez(folder / "1.npz", x=RNG.standard_normal((4, 6)).astype(np.float32))
    settings = CompareSettings(odd_model(tmp_path), str(folder), str(tmp_path / "out"), format="int8")
    report = compare(settings, Silent())
    assert report.run.samples == 4
    assert report.outputs[0].metrics["elements"] == 24


@pytest.mark.parametrize("absmax", [0.0, 1e-42])
def test_a_range_of_nothing_is_never_a_scale_of_zero(
    absmax: float, odd: tuple[str, str, str], tmp_path: Path
) -> None:
    """A table edited by hand, or of another tool: zero and denormal ranges become steps that engines take."""
    model, _, table = odd
    edited = json.loads(Path(table).read_text())
    edited["tensors"]["masked"]["absmax"] = absmax
    Path(table).write_text(json.dumps(edited))
    out = tmp_path / "typed.onnx"
    convert_model(model, None, "int8", table, str(out))
    proto = onnx.load(out)
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    (quantizer,) = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "masked"]
    assert values[quantizer.input[1]] >= np.finfo(np.float32).tiny


def test_a_negative_range_is_refused(odd: tuple[str, str, str], tmp_path: Path) -> None:
    model, _, table = odd
    edited = json.loads(Path(table).read_text())
    edited["tensors"]["masked"]["absmax"] = -1.0
    Path(table).write_text(json.dumps(edited))
    with pytest.raises(TableError, match=r"masked\.absmax"):
        convert_model(model, None, "int8", table, str(tmp_path / "typed.onnx"))
