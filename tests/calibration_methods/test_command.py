"""`trtdiag calibrate` as a user types it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from diag.cli.main import run


@pytest.fixture
def command(capsys):
    """Runs the command; exit code, standard output and standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run(["calibrate", *map(str, words)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def test_calibrate_then_merge(command, model, folder, tmp_path):
    for name, seeds in {"a": (0, 1), "b": (2, 3), "all": range(4)}.items():
        words = (model, "--data", folder(name, *seeds), "--out", tmp_path / f"{name}.json")
        code, out, _ = command(*words, "--method", "mse")
        assert code == 0 and "(uses mse)" in out and "percentile_99.999" in out
    parts = (tmp_path / "a.json", tmp_path / "b.json")
    code, out, _ = command("--merge", *parts, "--out", tmp_path / "m.json")
    assert code == 0 and "16 samples in 4 batches" in out
    assert (tmp_path / "m.json").read_bytes() == (tmp_path / "all.json").read_bytes()


def test_json_has_every_remark(command, model, folder, tmp_path):
    data = folder("some", 0, 1, 2, bad={1: np.nan})
    words = (model, "--data", data, "--out", tmp_path / "t.json", "--skip-bad", "--method", "best", "--json")
    code, out, _ = command(*words)
    found = json.loads(out)
    assert (code, found["method"], found["skipped_batches"], found["batches"]) == (0, "best", 1, 2)
    assert sum(found["best"].values()) == found["tensors"] == 5
    assert {"kind": "zero", "severity": "warning", "method": "", "tensors": {"zeros": None}} in found[
        "remarks"
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("m.onnx",), "Give --data"),
        (("m.onnx", "n.onnx", "--data", "d"), "2 models"),
        (("--merge", "a.json"), "two tables"),
        (("--merge", "a.json", "b.json", "--data", "d"), "reads no data"),
        (("--merge", "a.json", "b.json", "--skip-bad"), "reads no data"),
        (("--merge", "a.json", "b.json"), "a.json"),
    ],
)
def test_words_that_cannot_work(command, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, _, error = command(*words, "--out", "t.json")
    assert code == 2 and said in error
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--jobs", 0), ("--method", "average"), ("--limit", 0), ("--limit", -1)]
)
def test_options_out_of_range(command, model, folder, tmp_path, option, value):
    code, _, error = command(model, "--data", folder("d", 0), "--out", tmp_path / "t.json", option, value)
    assert code == 2 and "trtdiag: error" in error and "Traceback" not in error
