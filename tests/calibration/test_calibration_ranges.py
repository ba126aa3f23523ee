"""Min-max ranges against NumPy, the table as a file, and data that cannot be calibrated on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.calibration.table import read_table, write_table
from diag.errors import DataError, ModelError, TableError
from diag.pipeline.calibrate.tables import calibrate_model
from diag.progress import Silent
from fixtures.graphs import bert, llama, vit

CONTRACTIONS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@pytest.fixture
def written(tmp_path):
    """Writes a model and its batches; their paths."""

    def write(model, batches):
        onnx.save(model, tmp_path / "model.onnx")
        (tmp_path / "data").mkdir(exist_ok=True)
        for number, batch in enumerate(batches):
            np.savez(tmp_path / "data" / f"{number}.npz", **batch)
        return str(tmp_path / "model.onnx"), str(tmp_path / "data")

    return write


def operands(model):
    """Activations that a contraction reads: what INT8 quantizes."""
    constants = {tensor.name for tensor in model.graph.initializer}
    read = (name for node in model.graph.node if node.op_type in CONTRACTIONS for name in node.input[:2])
    return {name for name in read if name and name not in constants}


def all_values(model, batches):
    """Every operand's values over the batches, by a session of our own."""
    wanted = sorted(operands(model) - {value.name for value in model.graph.input})
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = [dict(zip(wanted, session.run(wanted, batch), strict=True)) | dict(batch) for batch in batches]
    return {name: np.concatenate([run[name].reshape(-1) for run in runs]) for name in operands(model)}


@pytest.mark.parametrize("make", [bert, llama, vit])
def test_ranges_against_numpy(written, tmp_path, make):
    fixture = make()
    batches = [fixture.batch(2, seed) for seed in range(3)]
    model, data = written(fixture.model, batches)
    table = calibrate_model(model, data, str(tmp_path / "table.json"), None, Silent())
    values = all_values(fixture.model, batches)
    assert table.tensors.keys() == values.keys()
    for name, found in table.tensors.items():
        assert found.minimum == pytest.approx(values[name].min(), rel=1e-5)
        assert found.maximum == pytest.approx(values[name].max(), rel=1e-5)
        assert found.absmax == pytest.approx(np.abs(values[name]).max(), rel=1e-5)
        assert found.elements == values[name].size
        assert found.nonfinite == 0
    assert table.batches == 3
    assert table.model_sha256 == hashlib.sha256(Path(model).read_bytes()).hexdigest()
    for name, scale in table.scales("int8").items():
        assert scale == pytest.approx(np.abs(values[name]).max() / 127, rel=1e-6)


def test_a_limit_takes_the_first_batches(written, tmp_path):
    fixture = bert()
    batches = [fixture.batch(2, seed) for seed in range(3)]
    model, data = written(fixture.model, batches)
    table = calibrate_model(model, data, str(tmp_path / "table.json"), 1, Silent())
    values = all_values(fixture.model, batches[:1])
    assert table.batches == 1
    for name, found in table.tensors.items():
        assert found.absmax == pytest.approx(np.abs(values[name]).max(), rel=1e-5)


def test_a_table_comes_back_as_it_was_written(written, tmp_path):
    fixture = bert()
    model, data = written(fixture.model, [fixture.batch()])
    table = calibrate_model(model, data, str(tmp_path / "table.json"), None, Silent())
    assert read_table(tmp_path / "table.json", table.model_sha256) == table
    write_table(table, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "table.json").read_bytes()
    json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)


def test_a_table_of_another_model_is_refused(written, tmp_path):
    fixture = bert()
    model, data = written(fixture.model, [fixture.batch()])
    calibrate_model(model, data, str(tmp_path / "table.json"), None, Silent())
    with pytest.raises(TableError, match="another model"):
        read_table(tmp_path / "table.json", "0" * 64)


def test_not_finite_data_are_named_with_their_batch(written, tmp_path):
    fixture = vit()
    batches = [fixture.batch(2, seed) for seed in range(3)]
    batches[1]["image"][0, 1, 2, 3] = np.nan
    model, data = written(fixture.model, batches)
    with pytest.raises(DataError, match=r"1\.npz.*'image'"):
        calibrate_model(model, data, str(tmp_path / "table.json"), None, Silent())
    assert not (tmp_path / "table.json").exists()


def one_matmul(*before):
    """`x` through some nodes, which write `operand`, into a MatMul."""
    value = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    nodes = [*before, helper.make_node("MatMul", ["operand", "w"], ["y"], "/product")]
    graph = helper.make_graph(
        nodes,
        "one",
        [value("x", TensorProto.FLOAT, ["n", 4])],
        [value("y", TensorProto.FLOAT, ["n", 4])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_a_tensor_that_is_not_finite_is_named_with_its_batch(written, tmp_path):
    """The data are finite, what the FP32 model makes of them is not."""
    model = one_matmul(helper.make_node("Log", ["x"], ["operand"], "/log"))
    good, bad = np.ones((2, 4), np.float32), np.array([[1, 2, -3, 4]], np.float32)
    path, data = written(model, [{"x": good}, {"x": good}, {"x": bad}])
    with pytest.raises(TableError, match=r"(?s)'operand'.*batch 2|batch 2.*'operand'|'operand'.*2\.npz"):
        calibrate_model(path, data, str(tmp_path / "table.json"), None, Silent())
    assert not (tmp_path / "table.json").exists()


def test_an_operand_of_zeros(written, tmp_path):
    model = one_matmul(helper.make_node("Relu", ["x"], ["operand"], "/relu"))
    path, data = written(model, [{"x": -np.ones((2, 4), np.float32)}])
    table = calibrate_model(path, data, str(tmp_path / "table.json"), None, Silent())
    assert table.tensors["operand"].absmax == 0
    assert 0 < table.scales("int8")["operand"] < np.inf


def test_a_model_without_anything_to_quantize(written, tmp_path):
    model = one_matmul(helper.make_node("Relu", ["x"], ["operand"], "/relu"))
    del model.graph.node[-1]
    model.graph.node[0].output[0] = "y"
    path, data = written(model, [{"x": np.ones((2, 4), np.float32)}])
    with pytest.raises(ModelError, match=r"nothing|no Conv|to quantize"):
        calibrate_model(path, data, str(tmp_path / "table.json"), None, Silent())
