"""Weak typing with a real TensorRT 10 on a real GPU, through the command."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.cli.main import run as run_command
from diag.engines.gpu import find_gpus
from diag.engines.scale_cache import read_scale_cache
from diag.engines.stamp import read_stamp


def missing():
    if importlib.util.find_spec("tensorrt") is None:
        return "TensorRT is not installed"
    if not find_gpus():
        return "there is no NVIDIA GPU"
    import tensorrt

    if not hasattr(tensorrt, "__version__"):
        return "the package tensorrt holds no TensorRT"
    if int(tensorrt.__version__.split(".")[0]) >= 11:
        return f"TensorRT {tensorrt.__version__} has no weak typing"
    return ""


WHY = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    shapes = (("w1", (256, 256)), ("w2", (256, 128)))
    weights = [
        numpy_helper.from_array((rng.standard_normal(s) * 0.05).astype(np.float32), n) for n, s in shapes
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Softmax", ["a"], ["b"], "soft", axis=-1),
        helper.make_node("MatMul", ["b", "w2"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 128])],
        weights,
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    for number in range(4):
        np.savez(tmp_path / f"batch{number}.npz", x=rng.standard_normal((64, 256)).astype(np.float32))
    return path


def build(model, out, *more):
    words = ["build", model, "--engine", "tensorrt", "--weak", "--data", model.parent, "--out", out, *more]
    with pytest.raises(SystemExit) as end:
        run_command([str(word) for word in [*words, "--opt-level", 1, "--quiet"]])
    sys.stdout.flush()
    return end.value.code


def test_fp16_with_a_pin(model, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema: trtdiag.plan/1\ndefault: fp16\npins: [{match: soft, format: fp32, alone: true}]\n"
    )
    engine = tmp_path / "fp16.engine"
    assert build(model, engine, "--plan", plan) == 0
    assert read_stamp(engine).flags["typing"] == "weak: fp16"


def test_int8_calibrates_writes_a_cache_and_reads_it_again(model, tmp_path):
    engine = tmp_path / "int8.engine"
    cache = tmp_path / "my.cache"
    assert build(model, engine, "--format", "int8", "--cache", cache) == 0
    read = read_scale_cache(cache)
    assert read.algorithm == "EntropyCalibration2"
    assert "x" in read.scales
    written = cache.read_bytes()
    assert build(model, tmp_path / "again.engine", "--format", "int8", "--cache", cache) == 0
    assert cache.read_bytes() == written
