"""Slices, from the data of a real model to the report; and what drift costs its quantized form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import onnx
import pytest

from diag.cli.main import run as run_command
from diag.drift.merge import merge
from diag.drift.stats_file import read_stats, stats_bytes
from diag.pipeline.drift.profile_slices import folder_of
from diag.report.io import read_report
from fixtures.graphs import vit

Run = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT-like model; calibration data; production whose odd requests are four times as large."""
    root, fixture = tmp_path_factory.mktemp("slices"), vit()
    onnx.save(fixture.model, root / "model.onnx")
    for part in ("calib", "mixed", "by/calm", "by/loud"):
        (root / part).mkdir(parents=True)
    for seed in range(4):
        np.savez(root / "calib" / f"{seed}.npz", **fixture.batch(4, seed))
        calm = fixture.batch(4, 100 + seed)
        name = next(iter(calm))
        loud = {name: calm[name] * np.float32(6)}
        mixed = np.where((np.arange(4) % 2 == 1).reshape(4, 1, 1, 1), loud[name], calm[name])
        np.savez(root / "mixed" / f"{seed}.npz", **{name: mixed})
        np.savez(root / "by" / "calm" / f"{seed}.npz", **calm)
        np.savez(root / "by" / "loud" / f"{seed}.npz", **loud)
    labels = "id,light\n" + "".join(f"{i},{'loud' if i % 2 else 'calm'}\n" for i in range(16))
    (root / "labels.csv").write_text(labels)
    assert run("calibrate", root / "model.onnx", "--data", root / "calib", "--out", root / "table.json") == 0
    return root


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command([*map(str, words), "--quiet"])
    return int(ended.value.code or 0)


def profile(root: Path, data: str, out: str, *more: object) -> int:
    words = ["profile", root / "model.onnx", "--data", root / data, "--calibration", root / "table.json"]
    return run(*words, "--out", root / out, *more)


@pytest.mark.parametrize("way", ["labels", "folders"])
def test_the_slice_that_drifts_is_named(folder: Path, way: str) -> None:
    if way == "labels":
        assert profile(folder, "mixed", "L", "--slice", f"{folder / 'labels.csv'}:light") == 0
    else:
        assert profile(folder, "by", "F", "--slice", "folders") == 0
    stats, out = folder / ("L" if way == "labels" else "F"), folder / f"out-{way}"
    assert run("drift", folder / "table.json", stats, "--model", folder / "model.onnx", "--out", out) == 0
    drift = read_report(out / "report.json").drift
    assert drift is not None
    assert [(part.name, part.level) for part in drift.slices] == [("calm", "ok"), ("loud", "fail")]
    assert drift.level == "fail"
    assert {request.slice for request in drift.worst_requests[:4]} == {"loud"}


def test_slices_add_up_to_the_whole(folder: Path) -> None:
    assert profile(folder, "mixed", "whole.stats") == 0
    assert profile(folder, "mixed", "parts", "--slice", f"{folder / 'labels.csv'}:light") == 0
    parts = [read_stats(path) for path in sorted((folder / "parts").rglob("*.stats"))]
    assert [part.source.requests for part in parts] == [8, 8]
    whole, joined = read_stats(folder / "whole.stats"), merge(parts)
    np.testing.assert_array_equal(whole.counts, joined.counts)
    np.testing.assert_array_equal(whole.sample_keys, joined.sample_keys)
    assert whole.source.identity == joined.source.identity
    assert len(stats_bytes(joined)) > 0


@pytest.mark.parametrize(
    ("slices", "text", "words"),
    [
        ("labels.csv:weather", None, "no column 'weather'"),
        ("short.csv:light", "light\ncalm\n", "slices end before"),
        ("long.csv:light", "light\n" + "calm\n" * 17, "17 labels for 16 requests"),
        ("absent.csv:light", None, "cannot be read"),
        ("light", None, "not understood"),
    ],
)
def test_labels_that_do_not_fit(
    folder: Path, slices: str, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (folder / slices.partition(":")[0]).write_text(text)
    given = f"{folder / slices}" if ":" in slices else slices
    assert profile(folder, "mixed", "bad", "--slice", given) == 2
    assert words in capsys.readouterr().err


def test_slices_need_one_scale(folder: Path) -> None:
    model = folder / "model.onnx"
    assert run("profile", model, "--data", folder / "by", "--slice", "folders", "--out", folder / "x") == 2


@pytest.mark.parametrize("name", ["a/b", "..", ".", "名前", "x" * 20, "a%2Fb", ".hidden", "c:\\d"])
def test_names_of_slices_are_names_of_folders(tmp_path: Path, name: str) -> None:
    made = tmp_path / folder_of(name)
    made.mkdir()
    assert made.resolve().parent == tmp_path.resolve()
    assert not made.name.startswith(".")
    assert unquote(made.name) == name


@pytest.mark.parametrize("first", ["table", "statistics"])
def test_cost_is_measured_beside_drift(folder: Path, first: str) -> None:
    out = folder / f"cost-{first}"
    assert profile(folder, "by/loud", "loud.stats") == 0
    assert profile(folder, "calib", "calib.stats") == 0
    calibration = folder / ("table.json" if first == "table" else "calib.stats")
    words = ["drift", calibration, folder / "loud.stats", "--model", folder / "model.onnx"]
    words += ["--data", folder / "by/loud", "--reference-data", folder / "calib", "--out", out]
    assert run(*words) == 0
    report = read_report(out / "report.json")
    assert report.drift is not None
    costs = report.drift.costs
    for kind, value in (("calibration", "calibration_sqnr_db"), ("production", "production_sqnr_db")):
        layers = {layer.name: layer for layer in read_report(out / f"compare-{kind}" / "report.json").layers}
        for cost in costs:
            assert getattr(cost, value) == layers[cost.layer].accumulated["sqnr_db"]
    losses = [
        c.calibration_sqnr_db - c.production_sqnr_db for c in costs if c.calibration_sqnr_db is not None
    ]
    assert losses == sorted(losses, reverse=True)
    assert report.drift.costs_agree is not None
    assert report.drift.costs_sentence
    assert json.loads((out / "report.json").read_text())["findings"][0]["layers"]


def test_thresholds_on_drift_are_no_thresholds_on_outputs(folder: Path) -> None:
    words = ["compare", folder / "model.onnx", "--format", "int8", "--data", folder / "calib"]
    assert run(*words, "--fail-under", "sqnr_loss_db<=3", "--out", folder / "never") == 2
    assert not (folder / "never" / "report.json").exists()
