"""`trtdiag build`: options that cannot work, and builds with TensorRT-RTX that need no GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest
from engine_models import save_model

from diag.engines.gpu import find_gpus
from diag.engines.stamp import read_stamp

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="the TensorRT-RTX wheel is not installed (pip install 'trtdiag[rtx]')",
)
RTX = ("--engine", "tensorrt-rtx")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--engine emulate", "there is no engine 'emulate'"),
        ("--engine tensorrt-rtx --weak --format fp16", "TensorRT-RTX has no weak typing"),
        ("--engine tensorrt-rtx --timing-cache t.cache", "no timing cache when it builds"),
        ("--engine tensorrt --timing-cache t.cache --no-timing-cache", "contradict each other"),
        ("--engine tensorrt --compute-capability SM89", "builds for the GPU that is here"),
        ("--engine tensorrt --weak", "--weak needs a plan"),
        ("--engine tensorrt --cache c.cache --format int8", "--cache is for weak typing"),
        ("--engine tensorrt --weak --format int8 --calibration t.json", "strongly typed"),
        ("--engine tensorrt --weak --format int8 --shapes x:1x64", "INT8 needs scales"),
        ("--engine tensorrt --weak --format int8 --shapes x:1x64 --cache model.onnx", "no text file"),
        ("--engine tensorrt-rtx --timeout 0", "time limit must be positive"),
        ("--engine tensorrt-rtx --workspace-mb 0", "at least 1 MB"),
        ("--engine tensorrt-rtx", "no shapes are given for them: x (batch, 64)"),
        ("--engine tensorrt-rtx --shapes x", "cannot be read"),
        ("--engine tensorrt-rtx --shapes x:1x64/2x64", "cannot be read"),
        ("--engine tensorrt-rtx --shapes z:1x64", "'z', which is no input of the model. Its inputs: x."),
        ("--engine tensorrt-rtx --shapes x:1x65", "does not fit the input, which is (batch, 64)"),
        ("--engine tensorrt-rtx --shapes x:1", "does not fit the input"),
        ("--engine tensorrt-rtx --shapes x:8x64/4x64/16x64", "must rise from smallest"),
        ("--engine tensorrt-rtx --shapes x:1x64 --format int8", "Give --calibration TABLE or --data DATA"),
        ("--engine tensorrt-rtx --data none", "data 'none' do not exist"),
        ("--engine tensorrt-rtx --shapes x:1x64 --plan none.yaml", "none.yaml"),
    ],
)
def test_what_cannot_be_asked(trtdiag, model, monkeypatch, words, says):
    monkeypatch.chdir(model.parent)
    ended = trtdiag("build", "model.onnx", *words.split(), "--out", "m.engine", "--quiet")
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1
    assert not (model.parent / "m.engine").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed")
@pytest.mark.parametrize("more", [(), ("--weak", "--format", "fp16")])
def test_without_tensorrt_the_line_that_installs_it(trtdiag, model, tmp_path, more):
    words = ("--shapes", "x:8x64", "--engine", "tensorrt", "--out", tmp_path / "m.engine", *more)
    ended = trtdiag("build", model, *words, "--json")
    assert ended.code == 3
    assert ended.json["error"]["exit_code"] == 3
    assert "tensorrt cannot be imported" in ended.err
    assert "pip install" in ended.err


@needs_rtx
@pytest.mark.rtx
def test_int8_from_data_is_stamped_and_reported(trtdiag, model, data, tmp_path):
    engine = tmp_path / "out" / "m.engine"
    ended = trtdiag("build", model, "--format", "int8", "--data", data, *RTX, "--out", engine, "--json")
    assert ended.code == 0
    found = ended.json
    assert found["built"] == {"int8": {"int8": 2}}
    assert found["profiles"] == {"x": [[4, 64], [8, 64], [8, 64]]}
    assert (found["tf32"], found["typing"], found["target"]) == (True, "strong", "SM89")
    assert set(found["files"]) == {"stamp", "log", "calibration"}
    stamp = read_stamp(engine)
    assert all((stamp.identity.model_sha256, stamp.identity.plan_sha256, stamp.identity.table_sha256))
    table = engine.with_name("m.engine.calibration.json")
    again = ("--format", "int8", "--calibration", table, "--shapes", "x:4x64/8x64/8x64")
    assert trtdiag("build", model, *again, *RTX, "--out", tmp_path / "2.engine", "--quiet").code == 0
    assert read_stamp(tmp_path / "2.engine").identity == stamp.identity

    kept = ("--model", model, "--format", "int8", "--strict")
    assert trtdiag("inspect", engine, *kept, "--quiet").code == 0
    other = save_model(tmp_path / "other.onnx", operator="Tanh")
    assert trtdiag("inspect", engine, "--model", other, "--quiet").code == 3
    refused = trtdiag("inspect", engine, "--model", model, "--format", "fp16", "--quiet")
    assert (refused.code, "built from another plan" in refused.err) == (3, True)


@needs_rtx
@pytest.mark.rtx
def test_a_model_as_it_is_with_flags(trtdiag, model, tmp_path):
    engine = tmp_path / "m.engine"
    flags = ("--no-tf32", "--opt-level", 2, "--workspace-mb", 256, "--compute-capability", "SM120")
    ended = trtdiag("build", model, "--shapes", "x:8x64", *RTX, *flags, "--out", engine)
    assert ended.code == 0, ended.err
    assert "TF32 off" in ended.out
    assert "2 layers asked in fp32: built 2 fp32" in ended.out
    stamp = read_stamp(engine)
    assert stamp.flags == {
        "tf32": "off",
        "opt_level": "2",
        "workspace_bytes": str(256 << 20),
        "marks": "none",
        "typing": "strong",
    }
    assert stamp.compute_capability == "SM120"
    assert stamp.identity.plan_sha256 == ""
    report = trtdiag("inspect", engine, "--model", model, "--json").json
    assert report["verdict"].startswith("2 of 2 layers were built as asked")
    assert all(layer["reason"] for layer in report["layers"])


@needs_rtx
@pytest.mark.rtx
@pytest.mark.skipif(bool(find_gpus()), reason="what is refused without a GPU")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--compute-capability SM90", "no compute capability"),
        ("--opt-level 9", "level 9 does not exist"),
        ("--refit", "This needs an NVIDIA GPU"),
        ("--version-compatible", "leave --version-compatible out"),
        ("--timeout 0.01", "stopped after its limit of 0.01 s"),
    ],
)
def test_what_the_builder_refuses(trtdiag, model, tmp_path, words, says):
    ended = trtdiag(
        "build", model, "--shapes", "x:8x64", *RTX, *words.split(), "--out", tmp_path / "m.engine", "--quiet"
    )
    assert ended.code == 3
    assert says in ended.err
    assert "Traceback" not in ended.err


@needs_rtx
@pytest.mark.rtx
def test_a_missing_plugin_is_named_with_its_node(trtdiag, tmp_path):
    model = save_model(tmp_path / "model.onnx", operator="MyPlugin", domain="my.domain")
    words = ("--shapes", "x:8x64", *RTX, "--out", tmp_path / "m.engine", "--json")
    ended = trtdiag("build", model, *words)
    assert ended.code == 3
    problem = json.loads(ended.out)["error"]["problem"]
    assert "refuses 1 of the model's nodes" in problem
    assert "middle (MyPlugin): no such operator, and no plugin of that name is registered" in problem
