"""`trtdiag inspect` on real kernel lists and a real calibration cache, and on what is broken."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest

from diag.engines.stamp import Identity, Stamp, sha256_of, write_stamp
from diag.report.io import loads, read_report


def kinds(report, severity):
    return {f["kind"] for f in report["findings"] if f["severity"] == severity}


def test_an_int8_engine_without_int8_fails_strictly(trtdiag, sample, tmp_path):
    file = sample("minilm_weak_int8_inspector.json")
    ended = trtdiag("inspect", file, "--format", "int8", "--strict", "--out", tmp_path / "o", "--json")
    assert ended.code == 1
    report = ended.json
    assert kinds(report, "error") == {"precision-not-built"}
    assert report["gate"]["passed"] is False
    assert report["verdict"].startswith("INT8: 0 of 48 layers were built as asked")
    assert loads(ended.out, "stdout") == read_report(tmp_path / "o" / "report.json")
    page = (tmp_path / "o" / "report.html").read_text()
    assert "none of the engine" in page
    assert report["kernels"][1]["name"] in page


def test_without_strict_it_only_says_so(trtdiag, sample):
    ended = trtdiag("inspect", sample("minilm_weak_int8_inspector.json"), "--format", "int8")
    assert ended.code == 0
    assert "error: int8 was asked for 48 nodes" in ended.out
    assert "48 layers, built: 48 fp16" in ended.out


@pytest.mark.parametrize("name", ["minilm_int8_inspector.json", "rtx_minilm_int8.build.log"])
def test_an_int8_engine_as_asked_passes_strictly(trtdiag, sample, name):
    ended = trtdiag("inspect", sample(name), "--format", "int8", "--strict")
    assert ended.code == 0, ended.out
    assert "48 layers, built: 48 int8" in ended.out
    assert "strict: passed" in ended.out


@pytest.mark.parametrize("name", ["minilm_fp16_inspector.json", "minilm_fp16_verbose_tail.log"])
def test_fp16_accumulation_is_a_warning(trtdiag, sample, name):
    ended = trtdiag("inspect", sample(name), "--format", "fp16", "--strict", "--json")
    assert ended.code == 1
    checks = {check["name"]: check["passed"] for check in ended.json["gate"]["checks"]}
    assert checks == {"requests not honoured": True, "other errors and warnings": False}
    found = next(f for f in ended.json["findings"] if f["kind"] == "reduction-accumulation")
    assert found["evidence"]["kernels"] == 24
    assert len(found["layers"]) == 36


def test_norms_in_fp16_come_with_pins(trtdiag, sample):
    report = trtdiag("inspect", sample("smol_fp16_inspector.json"), "--json").json
    norms = next(f for f in report["findings"] if f["kind"] == "norm-square-overflow")
    assert len(norms["mend"]["pins"]) == len(norms["layers"]) > 300
    assert report["layers"]
    assert all(layer["status"] == "not_run" for layer in report["layers"])


def test_nothing_pretends_to_have_run(trtdiag, sample):
    report = trtdiag("inspect", sample("minilm_fp32_inspector.json"), "--json").json
    assert report["outputs"] == report["births"] == []
    assert (report["run"]["batches"], report["run"]["samples"], report["run"]["data"]) == (0, 0, "")
    assert report["run"]["engine"] == "an engine of unknown version, read and not run"
    assert kinds(report, "note") == {"tf32-default"}


def test_times_price_the_reformats(trtdiag, sample, tmp_path):
    file = sample("minilm_weak_int8_inspector.json")
    layers = json.loads(file.read_text())["Layers"]
    times = tmp_path / "times.json"
    times.write_text(json.dumps([{"count": 1}, *({"name": x["Name"], "averageMs": 0.5} for x in layers)]))
    ended = trtdiag("inspect", file, "--times", times)
    assert "reformats        2 kernels, 1 ms of 26 ms" in ended.out


def cache(tmp_path, *entries):
    path = tmp_path / "model.cache"
    hexed = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in entries]
    path.write_text("\n".join(["TRT-8601-EntropyCalibration2", *hexed]) + "\n")
    return path


def test_a_cache_of_placeholders(trtdiag, model, tmp_path):
    file = cache(tmp_path, ("x", 1 / 127), ("b: c", 1 / 127))
    ended = trtdiag("inspect", file, "--model", model, "--strict", "--out", tmp_path / "o")
    assert ended.code == 1
    assert "TensorRT 8.6.1, EntropyCalibration2, with 2 scales" in ended.out
    assert "2 of 2 scales are 1/127" in ended.out
    assert "1 of 2 tensors that the model multiplies have no scale" in ended.out
    assert read_report(tmp_path / "o" / "report.json").gate.passed is False


def test_a_real_cache(trtdiag):
    file = Path(__file__).parent / "samples" / "minilm_entropy2.cache"
    report = trtdiag("inspect", file, "--json").json
    assert report["verdict"].startswith("Calibration cache of TensorRT 10.6.0, EntropyCalibration2, with 431")
    found = {finding["id"]: finding for finding in report["findings"]}
    assert found["cache-infinite"]["evidence"]["tensors"] == 11
    assert found["cache-placeholder-0.00787"]["severity"] == "note"
    assert found["cache-placeholder-0.00787"]["evidence"]["tensors"] == 20
    assert len(found) == 2


def test_a_sound_cache_passes(trtdiag, model, tmp_path):
    file = cache(tmp_path, ("x", 0.03), ("b", 0.01))
    ended = trtdiag("inspect", file, "--model", model, "--strict")
    assert (ended.code, "no scale" in ended.out) == (0, False)


def broken(tmp_path, sample, model):
    text = sample("minilm_fp16_inspector.json").read_text()
    log = sample("minilm_fp16_verbose_tail.log").read_text()
    files = {
        "cut.json": text[:5000],
        "names.json": '{"Layers": ["a", "b"]}',
        "other.json": '{"a": 1}',
        "cut.log": log[:20_000],
        "empty.json": "",
        "cut.cache": "TRT-8601-EntropyCalibration2\nx: 3c01",
        "whole.cache": "TRT-8601-EntropyCalibration2\nx: 3c010204\n",
        "headless.cache": "TRT-8601-EntropyCalibration2\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary").write_bytes(b"\x00\x01\x02" * 50)
    (tmp_path / "pins.yaml").write_text(
        "schema: trtdiag.plan/1\ndefault: int8\npins: [{match: first, format: fp16}]\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("none.engine", "does not exist"),
        ("cut.json", "not complete JSON"),
        ("names.json", "only the layers' names"),
        ("other.json", "not an engine inspector's file"),
        ("cut.log", "ends inside its list of layers"),
        ("empty.json", "is empty"),
        ("cut.cache", "line 2 is no `tensor: hexadecimal scale`"),
        ("headless.cache", "holds no scale"),
        ("binary", "neither an engine"),
        ("minilm.json --plan pins.yaml", "names layers of a model"),
        ("minilm.json --plan pins.yaml --format int8", "either --plan PLAN or --format"),
        ("minilm.json --format int9", "int9"),
        ("minilm.json --model none.onnx", "does not exist"),
        ("minilm.json --times cut.json", "not complete JSON"),
        ("whole.cache --times minilm.json", "holds scales only"),
        ("whole.cache --format int8", "Leave out --plan, --format and --times"),
        ("model.onnx --times minilm.json", "is read as it is"),
    ],
)
def test_what_cannot_be_read(trtdiag, sample, model, tmp_path, monkeypatch, words, says):
    broken(tmp_path, sample, model)
    (tmp_path / "minilm.json").write_text(sample("minilm_fp16_inspector.json").read_text())
    monkeypatch.chdir(tmp_path)
    ended = trtdiag("inspect", *words.split(), "--quiet")
    assert ended.code == 2
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed: it would load the engine"
)
def test_an_engine_alone_needs_tensorrt(trtdiag, tmp_path):
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"ftrt" + bytes(100))
    ended = trtdiag("inspect", engine, "--quiet")
    assert ended.code == 3
    assert "tensorrt cannot be imported" in ended.err
    assert "pip install" in ended.err


@pytest.fixture
def stamped(sample, tmp_path):
    """An engine of a 10.16 on a consumer Blackwell, with a real FP16 inspector file beside it."""
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"ftrt" + bytes(100))
    (tmp_path / "m.engine.inspector.json").write_text(sample("minilm_fp16_inspector.json").read_text())
    write_stamp(
        engine,
        Stamp(
            sha256_of(engine), Identity("a" * 64), "tensorrt", "10.16.1", "12.0", "RTX 5090", {"tf32": "on"}
        ),
    )
    return engine


def test_a_known_defect_is_quoted(trtdiag, stamped):
    report = trtdiag("inspect", stamped, "--json").json
    found = next(f for f in report["findings"] if f["kind"] == "engine-defect")
    assert found["severity"] == "note"
    assert found["evidence"]["source"] == "NVIDIA/TensorRT#4837"
    assert report["run"]["versions"]["tensorrt"] == "10.16.1"
    assert report["run"]["flags"]["tf32"] == "on"
    assert report["model"]["sha256"] == "a" * 64


def test_an_engine_of_another_model_is_refused(trtdiag, stamped, model):
    ended = trtdiag("inspect", stamped, "--model", model, "--quiet")
    assert ended.code == 3
    assert "built from another model" in ended.err


def test_a_changed_engine_is_refused(trtdiag, stamped):
    stamped.write_bytes(b"ftrt" + bytes(101))
    ended = trtdiag("inspect", stamped, "--quiet")
    assert ended.code == 3
    assert "changed since it was stamped" in ended.err
