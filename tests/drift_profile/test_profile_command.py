"""`trtdiag profile` from the command line: right figures, exact merging, clear refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import UTC, datetime

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from profile_tools import small_model

from diag.drift.stats_file import read_stats

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def profiled(home, trtdiag, tmp_path):
    """Profiles a data folder of `home`; what --json says, and the statistics."""

    def run(data, *more, calibration="table.json"):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.stats"
        words = ["profile", home / "model.onnx", "--data", home / data, "--out", out, "--json", *more]
        if calibration is not None:
            words += ["--calibration", home / calibration]
        code, said, err = trtdiag(*words)
        assert (code, err) == (0, "")
        return json.loads(said), read_stats(out), out

    return run


def all_of(home, data):
    return np.concatenate([np.load(f)["x"] for f in sorted((home / data).glob("*.npz"))])


def test_calibration_under_its_own_table(home, profiled):
    said, stats, _ = profiled("calibration")
    x = all_of(home, "calibration")
    assert [(t["name"], t["kind"], t["scale_from"]) for t in said["tensors"]] == [
        ("x", "input", "table"),
        ("h", "activation", "table"),
        ("y", "output", "unit"),
        ("z", "output", "unit"),
    ]
    assert said["table_sha256"] == hashlib.sha256((home / "table.json").read_bytes()).hexdigest()
    assert (said["requests"], said["batches"]) == (20, 4)
    assert stats["x"].tensor.range == np.abs(x).max()
    assert stats["x"].clipped == stats["h"].clipped == 0
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in small_model().graph.initializer}
    hidden = np.maximum(x @ weights["w1"], 0)
    assert stats["h"].mean == pytest.approx(hidden.mean(), rel=1e-5)
    assert stats["y"].rms == pytest.approx(np.sqrt(np.mean((hidden @ weights["w2"]) ** 2.0)), rel=1e-5)
    assert stats["z"].maximum == 2 * x.max()


def test_production_under_the_calibrations_table(home, profiled):
    said, stats, _ = profiled("production")
    x, limit = all_of(home, "production"), np.abs(all_of(home, "calibration")).max()
    assert said["tensors"][0]["clipped_share"] == np.mean(np.abs(x) > limit) > 0.05
    assert stats["x"].sqnr_db < 25
    worst = np.argsort(-np.maximum(np.abs(x) - limit, 0).max(axis=1))[0]
    named = [label for label, _ in stats["x"].worst]
    assert f"production/{worst // 5}.npz[{worst % 5}]" in named


def test_parts_merge_into_the_whole(home, profiled, trtdiag, tmp_path):
    whole = profiled("production")[2]
    parts = []
    for i in range(4):
        (tmp_path / "part" / "production").mkdir(parents=True, exist_ok=True)
        shutil.copy(home / "production" / f"{i}.npz", tmp_path / "part" / "production")
        parts.append(profiled(tmp_path / "part" / "production")[2])
        (tmp_path / "part" / "production" / f"{i}.npz").unlink()
    merged = tmp_path / "merged"
    code, said, _ = trtdiag("profile", "--merge", *parts[::-1], "--out", merged)
    assert code == 0 and "20 requests" in said
    assert merged.read_bytes() == whole.read_bytes()
    code, _, err = trtdiag("profile", "--merge", parts[0], parts[0], "--out", merged)
    assert code == 2 and "hold the same requests" in err


def test_without_a_table_the_data_scale_themselves(home, profiled, trtdiag, tmp_path):
    said, stats, out = profiled("production", calibration=None)
    x = all_of(home, "production")
    assert said["table_sha256"] is None
    assert {t["scale_from"] for t in said["tensors"]} == {"data"}
    assert stats["x"].tensor.range == np.abs(x).max()
    assert stats["x"].clipped == 0
    code, text, err = trtdiag("profile", home / "model.onnx", "--data", home / "production", "--out", out)
    assert code == 0 and "no --calibration" in err and "their own scales" in text
    _, other, other_out = profiled("calibration", calibration=out)
    assert other.tensors == stats.tensors, "statistics bring their scales"
    assert trtdiag("profile", "--merge", out, other_out, "--out", tmp_path / "m", "--quiet")[0] == 0
    own = profiled("calibration", calibration=None)[2]
    code, _, err = trtdiag("profile", "--merge", out, own, "--out", tmp_path / "m")
    assert code == 2 and "another scale" in err


def test_channels_and_date(home, profiled):
    _, stats, _ = profiled("production", "--channels", "--date", "2026-11-30")
    x = all_of(home, "production")
    np.testing.assert_array_equal(stats["x"].channels.absmax, np.abs(x).max(axis=0))
    day = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
    assert (stats.source.begun, stats.source.ended) == (day, day)
    assert profiled("production")[1]["x"].channels is None


def test_limit_and_random_data(home, profiled, trtdiag, tmp_path):
    assert profiled("production", "--limit", "2")[0]["batches"] == 2
    code, said, _ = trtdiag(
        "profile", home / "model.onnx", "--data", "random:3", "--calibration", home / "table.json",
        "--out", tmp_path / "r",
    )  # fmt: skip
    assert code == 0 and "RANDOM numbers (seed 3)" in said


def test_nan_in_production_is_counted_and_reported(home, trtdiag, tmp_path):
    x = all_of(home, "production")[:5]
    x[2, 3] = np.nan
    np.savez(tmp_path / "bad.npz", x=x)
    words = ["profile", home / "model.onnx", "--data", tmp_path / "bad.npz", "--out", tmp_path / "s"]
    code, said, _ = trtdiag(*words, "--calibration", home / "table.json")
    assert code == 0
    assert "warning: x: 1 elements in 1 requests are not finite" in said
    found = read_stats(tmp_path / "s")
    assert found["h"].tally("nan") == 8, "the whole row"
    assert found["h"].elements == 4 * 8
    assert found["h"].worst[0] == (f"{tmp_path.name}/bad.npz[2]", np.inf)


def test_refusals(home, trtdiag, tmp_path):
    other = small_model()
    other.graph.node.append(helper.make_node("Abs", ["z"], ["w"], name="more"))
    other.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["n", 6]))
    onnx.save(other, tmp_path / "other.onnx")
    (tmp_path / "empty.stats").write_bytes(b"")
    (tmp_path / "cut.stats").write_bytes(b"PK\x03\x04")
    data = ("--data", home / "production")
    out = ("--out", tmp_path / "o")
    table = ("--calibration", home / "table.json")
    for words, said in {
        ("profile", tmp_path / "other.onnx", *data, *out, *table): "made for another model",
        ("profile", home / "model.onnx", *out): "nothing to profile",
        ("profile", home / "model.onnx", "two", *data, *out): "2 models",
        ("profile", home / "model.onnx", *data, *out, "--date", "yesterday"): "'yesterday' is no date",
        ("profile", home / "model.onnx", *data, *out, "--calibration", tmp_path / "cut.stats"): "cut off",
        ("profile", home / "model.onnx", *data, *out, "--calibration", tmp_path / "none"): "cannot be read",
        ("profile", "--merge", tmp_path / "empty.stats", tmp_path / "cut.stats", *out): "empty file",
        ("profile", "--merge", tmp_path / "cut.stats", *out): "two files or more",
        ("profile", "--merge", "a", "b", *data, *out): "reads no data",
        ("profile", "--merge", "a", "b", "--date", "2026-12-01", *out): "reads no data",
        ("profile", "--merge", "a", "b", "--slice", "l.csv:lang", *out): "reads no data",
        ("profile", "--merge", "a", "b", "--channels", *out): "reads no data",
    }.items():
        code, text, err = trtdiag(*words)
        assert code == 2, words
        assert said in err and not text
        assert err.count("\n") == 1 and "Traceback" not in err
    assert not (tmp_path / "o").exists()
