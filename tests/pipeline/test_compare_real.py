"""The main job on real models with real data, against what was measured before this tool was written."""

from __future__ import annotations

import json

import pytest

from diag.cli.main import run as run_command
from diag.errors import DataError, ModelError
from diag.pipeline.demo import assets as demo_assets
from diag.report.io import read_report
from fixtures.real import text_models

PLAN = "schema: trtdiag.plan/1\ndefault: int8\npins:\n"


def trtdiag(*words):
    with pytest.raises(SystemExit) as end:
        run_command([str(word) for word in words])
    return end.value.code


def compare(model, data, out, *more):
    assert trtdiag("compare", model, "--data", data, "--out", out, "--quiet", *more) == 0
    assert (out / "report.html").stat().st_size > 100_000
    return read_report(out / "report.json")


def metric(report, name, output=None):
    return next(o.metrics[name] for o in report.outputs if output in (None, o.name))


def write_plan(path, *roles, fmt="fp16"):
    path.write_text(PLAN + "".join(f"  - {{role: {role}, format: {fmt}}}\n" for role in roles))
    return path


# The ViT that a package carries: plain INT8 ruins it, and attention is the culprit.


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Model, calibration table of 24 photos, and the 16 photos that are not among them."""
    folder = tmp_path_factory.mktemp("photos")
    try:
        model = demo_assets.vit_model()
        demo_assets.write_photos(folder / "calib", "calib")
        demo_assets.write_photos(folder / "data", "unseen")
    except (ModelError, DataError) as missing:
        pytest.skip(str(missing))
    table = folder / "table.json"
    assert trtdiag("calibrate", model, "--data", folder / "calib", "--out", table, "--quiet") == 0
    return model, folder / "data", table


@pytest.fixture(scope="module")
def plain(photos, tmp_path_factory):
    """The ViT in INT8 without pins; the folder of results and the report."""
    model, data, table = photos
    out = tmp_path_factory.mktemp("vit") / "int8"
    return out, compare(model, data, out, "--format", "int8", "--calibration", table)


def test_int8_ruins_the_vit(plain):
    _, report = plain
    assert metric(report, "sqnr_db") < 25
    worst = sorted((layer for layer in report.layers if layer.local), key=lambda x: x.local["sqnr_db"])
    assert {layer.role for layer in worst[:4]} == {"pv_matmul"}


def test_pv_in_fp16_mends_the_vit(photos, tmp_path):
    model, data, table = photos
    plan = write_plan(tmp_path / "plan.yaml", "pv_matmul")
    report = compare(model, data, tmp_path / "out", "--plan", plan, "--calibration", table)
    assert metric(report, "sqnr_db") > 30
    assert report.plan.pins[0].layers == 12


def test_what_the_report_suggests_mends_the_vit(photos, plain, tmp_path):
    model, data, table = photos
    out, report = plain
    again = compare(model, data, tmp_path / "mended", "--plan", out / "mend.yaml", "--calibration", table)
    assert metric(again, "sqnr_db") > metric(report, "sqnr_db") + 5


# Text models, exported once.


def exported(make):
    try:
        return make()
    except (ModelError, DataError) as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """MiniLM, its table of 64 English sentences, and 128 other ones."""
    model = exported(text_models.minilm)
    table = tmp_path_factory.mktemp("minilm") / "table.json"
    calib = exported(lambda: text_models.minilm_data("en_calib"))
    assert trtdiag("calibrate", model, "--data", calib, "--out", table, "--quiet") == 0
    assert json.loads(table.read_text())["batches"] == 8
    return model, text_models.minilm_data("en"), table


@pytest.mark.export
def test_minilm_int8(sentences, tmp_path):
    model, data, table = sentences
    report = compare(model, data, tmp_path / "out", "--format", "int8", "--calibration", table)
    assert metric(report, "cosine", "sentence_embedding") == pytest.approx(0.972, abs=0.01)
    assert (report.run.batches, report.run.samples) == (16, 128)
    quantized = [layer for layer in report.layers if layer.format == "int8"]
    assert len(quantized) == 48
    worst = min((layer for layer in quantized), key=lambda layer: layer.local["sqnr_db"])
    assert worst.role == "ffn_down"


@pytest.mark.export
def test_minilm_with_its_ffn_pinned(sentences, tmp_path):
    model, data, table = sentences
    plan = write_plan(tmp_path / "plan.yaml", "ffn_up", "ffn_down")
    report = compare(model, data, tmp_path / "out", "--plan", plan, "--calibration", table)
    assert metric(report, "cosine", "sentence_embedding") >= 0.995


@pytest.mark.export
def test_minilm_with_its_attention_pinned_is_no_better(sentences, tmp_path):
    """The negative control: in this model the attention is innocent."""
    model, data, table = sentences
    plan = write_plan(tmp_path / "plan.yaml", "qk_matmul", "pv_matmul")
    report = compare(model, data, tmp_path / "out", "--plan", plan, "--calibration", table, "--limit", 8)
    assert metric(report, "cosine", "sentence_embedding") < 0.985


@pytest.mark.export
def test_smollm2_fp16_fails_in_silence(tmp_path):
    model = exported(text_models.smollm2)
    data = exported(lambda: text_models.smollm2_data("en"))
    report = compare(model, data, tmp_path / "out", "--format", "fp16", "--limit", 3)
    logits = report.outputs[0].metrics
    assert logits["top1"] < 0.05
    assert logits["nonfinite"] == 0
    first = report.births[0]
    square = next(layer for layer in report.layers if layer.name == first.layer)
    assert "/layers.3/input_layernorm/" in first.layer
    assert (square.op_type, square.role, square.block) == ("Pow", "norm", 3)
    assert report.findings[0].kind == "norm-square-overflow"
    assert report.findings[0].layers[0] == first.layer
    assert first.layer in report.verdict
