"""`trtdiag check` as a user types it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from foreign_models import quantized_by_ort

from diag.report.io import loads, read_report
from fixtures.graphs.recipes import RECIPES


@pytest.fixture
def overflowing(tmp_path):
    """The model and the batch of a recipe."""

    def write(name):
        recipe = RECIPES[name]()
        onnx.save(recipe.model, tmp_path / "r.onnx")
        np.savez(tmp_path / "r.npz", **recipe.feeds)
        return tmp_path / "r.onnx", tmp_path / "r.npz"

    return write


def test_a_float_model_is_checked_for_fp16(trtdiag, model, tmp_path):
    ended = trtdiag("check", model, "--out", tmp_path / "o", "--json")
    assert ended.code == 0
    report = ended.json
    assert report["plan"]["default"] == "fp16"
    assert report["verdict"] == "FP16, by rules alone: no hazard found."
    assert loads(ended.out, "stdout") == read_report(tmp_path / "o" / "report.json")
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"report.json", "report.html"}


def test_strict(trtdiag, model, overflowing, tmp_path):
    assert trtdiag("check", model, "--strict", "--out", tmp_path / "o").code == 0
    faulty, data = overflowing("R1")
    words = ("check", faulty, "--data", data, "--out", tmp_path / "o2")
    assert trtdiag(*words).code == 0
    ended = trtdiag(*words, "--strict")
    assert ended.code == 1
    assert "strict: failed" in ended.out
    assert "error: the square inside a norm leaves the FP16 range at " in ended.out


@pytest.mark.parametrize("name", ["R1", "R2", "R4", "R10"])
def test_the_mend_mends(trtdiag, overflowing, tmp_path, name):
    """The plan that check writes, measured by compare, which knows nothing of it."""
    faulty, data = overflowing(name)
    trtdiag("check", faulty, "--data", data, "--out", tmp_path / "o")

    def sqnr(*plan):
        report = trtdiag("compare", faulty, *plan, "--data", data, "--out", tmp_path / "c", "--json").json
        return float(report["outputs"][0]["metrics"]["sqnr_db"])

    assert sqnr("--format", "fp16") < 10
    assert sqnr("--plan", tmp_path / "o" / "mend.yaml") > 40


def test_a_quantized_model_is_checked_for_its_quantizers(trtdiag, tmp_path):
    _, qdq = quantized_by_ort(tmp_path, "cnn", per_channel=True, symmetric=False)
    ended = trtdiag("check", qdq, "--strict", "--out", tmp_path / "o", "--json")
    assert ended.code == 1
    kinds = {(f["id"], f["severity"]) for f in ended.json["findings"]}
    assert kinds == {("bias-codes", "error"), ("zero-point", "error"), ("uint8", "warning")}
    assert ended.json["verdict"].startswith("15 quantizers, by rules alone: 2 errors, 1 warning: ")


def test_one_word_for_every_format(trtdiag, model, data, tmp_path):
    for fmt in ("fp32", "fp16", "bf16", "int8", "fp8"):
        ended = trtdiag("check", model, "--format", fmt, "--data", data, "--out", tmp_path / fmt)
        assert ended.code == 0, ended.err
        assert "no hazard found" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--limit", 1), "Give --data too"),
        (("--format", "fp16", "--plan", "p.yaml"), "either --plan PLAN or --format FORMAT"),
        (("--format", "fp7"), "fp7"),
        (("--data", "gone.npz"), "gone.npz"),
    ],
)
def test_words_that_cannot_work(trtdiag, model, tmp_path, words, said):
    ended = trtdiag("check", model, *words, "--out", tmp_path / "o")
    assert ended.code == 2
    assert said in ended.err


def test_the_page_claims_no_comparison(trtdiag, overflowing, tmp_path):
    faulty, data = overflowing("R1")
    trtdiag("check", faulty, "--data", data, "--out", tmp_path / "o")
    page = (tmp_path / "o" / "report.html").read_text()
    for words in ("Where it begins", "layers compared", "Damaged", "What the numbers mean"):
        assert words not in page
    assert ">Errors</span>" in page
    assert "4 samples in 1 batch" in page
