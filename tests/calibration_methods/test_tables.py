"""Tables as files: merged, spread over processes, interrupted, refused; the same bytes in the end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from diag.calibration.minmax import measure_ranges
from diag.calibration.remarks import remarks
from diag.calibration.table import CalibrationTable, read_table, write_table
from diag.errors import DataError, TableError, UsageError
from diag.feeds import open_feeds
from diag.model.load import load_model
from diag.pipeline.calibrate.tables import CalibrateSettings, calibrate, merge
from diag.progress import Silent


class Notes(Silent):
    """Keeps what is said; ends the run after some steps, as a key press would."""

    def __init__(self, steps: int | None = None) -> None:
        self.said: list[str] = []
        self._left = steps

    def advance(self, steps: int = 1) -> None:
        if self._left is not None:
            self._left -= steps
            if self._left < 0:
                raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.said.append(text)


def made(model: Path, data: Path, out: Path, **options: object) -> CalibrationTable:
    settings = CalibrateSettings(str(model), str(data), str(out), **options)
    return calibrate(settings, Silent())


def test_merged_tables_are_one_run_over_all_byte_for_byte(model, folder, tmp_path):
    parts = {"a": (0, 1), "b": (2,), "c": (3, 4, 5)}
    for name, seeds in parts.items():
        made(model, folder(name, *seeds), tmp_path / f"{name}.json", method="entropy")
    whole = tmp_path / "whole.json"
    made(model, folder("all", *range(6)), whole, method="entropy")
    for order in (("a", "b", "c"), ("c", "a", "b")):
        merge([str(tmp_path / f"{name}.json") for name in order], str(tmp_path / "m.json"), None)
        assert (tmp_path / "m.json").read_bytes() == whole.read_bytes()
    merge([str(tmp_path / "c.json"), str(tmp_path / "b.json")], str(tmp_path / "cb.json"), None)
    merge([str(tmp_path / "cb.json"), str(tmp_path / "a.json")], str(tmp_path / "m.json"), None)
    assert (tmp_path / "m.json").read_bytes() == whole.read_bytes()


def test_bad_batches_are_counted_alike_in_parts_and_in_one_run(model, folder, tmp_path):
    bad = {1: np.nan, 3: 0.0}
    for name, seeds in {"a": (0, 1), "b": (2, 3, 4), "all": range(5)}.items():
        made(model, folder(name, *seeds, bad=bad), tmp_path / f"{name}.json", skip_bad=True)
    merge([str(tmp_path / "a.json"), str(tmp_path / "b.json")], str(tmp_path / "m.json"), None)
    assert (tmp_path / "m.json").read_bytes() == (tmp_path / "all.json").read_bytes()
    assert read_table(tmp_path / "all.json").skipped_batches == 2


def test_processes_give_the_same_bytes(model, folder, tmp_path):
    data = folder("all", *range(7))
    made(model, data, tmp_path / "one.json")
    made(model, data, tmp_path / "two.json", jobs=2)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


@pytest.mark.parametrize("method", ["all", "best"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(model, folder, tmp_path, method):
    data = folder("all", *range(5))
    made(model, data, tmp_path / "whole.json", method=method)
    settings = CalibrateSettings(str(model), str(data), str(tmp_path / "t.json"), method=method)
    with pytest.raises(KeyboardInterrupt):
        calibrate(settings, Notes(3))
    assert (tmp_path / ".t.json.state").is_file() and not (tmp_path / "t.json").exists()
    again = Notes()
    calibrate(settings, again)
    assert any("resumed" in text for text in again.said)
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not (tmp_path / ".t.json.state").exists()


def test_a_skipped_batch_is_not_counted_again_after_resuming(model, folder, tmp_path):
    data = folder("all", *range(5), bad={0: np.inf})
    made(model, data, tmp_path / "whole.json", skip_bad=True)
    settings = CalibrateSettings(str(model), str(data), str(tmp_path / "t.json"), skip_bad=True)
    with pytest.raises(KeyboardInterrupt):
        calibrate(settings, Notes(3))
    calibrate(settings, Silent())
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_what_another_run_kept_is_not_taken_up(model, folder, tmp_path):
    settings = CalibrateSettings(str(model), str(folder("a", 0, 1, 2)), str(tmp_path / "t.json"))
    with pytest.raises(KeyboardInterrupt):
        calibrate(settings, Notes(1))
    other = folder("b", 3, 4, 5)
    notes = Notes()
    calibrate(CalibrateSettings(str(model), str(other), str(tmp_path / "t.json")), notes)
    made(model, other, tmp_path / "fresh.json")
    assert not notes.said
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "fresh.json").read_bytes()


def test_a_killed_command_goes_on_to_the_same_bytes(model, folder, tmp_path):
    data = folder("all", *range(40), samples=16)
    made(model, data, tmp_path / "whole.json")
    words = ["calibrate", str(model), "--data", str(data), "--out", str(tmp_path / "t.json")]
    command = [sys.executable, "-m", "diag.cli.main", *words, "--jobs", "2"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / ".t.json.state").exists() and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.kill()
    running.wait()
    made(model, data, tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_batch_that_is_not_finite_is_named_and_refused(model, folder, tmp_path):
    with pytest.raises(DataError, match=r"001\.npz.*holds nan"):
        made(model, folder("inputs", 0, 1, bad={1: np.nan}), tmp_path / "t.json")
    with pytest.raises(TableError, match=r"'logs' is not finite in .*001\.npz.*--skip-bad"):
        made(model, folder("inside", 0, 1, bad={1: 0.0}), tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_bad_batches_are_left_out_on_request_and_said(model, folder, tmp_path, jobs):
    data = folder("some", *range(5), bad={0: np.nan, 3: 0.0})
    notes = Notes()
    settings = CalibrateSettings(str(model), str(data), str(tmp_path / "t.json"), jobs=jobs, skip_bad=True)
    table = calibrate(settings, notes)
    clean = made(model, folder("clean", 1, 2, 4), tmp_path / "clean.json")
    assert (table.skipped_batches, table.batches, table.data_sha256) == (2, 3, clean.data_sha256)
    assert table.tensors["logs"].nonfinite == 1
    assert table.tensors["hidden"].methods == clean.tensors["hidden"].methods
    assert any("000.npz" in text for text in notes.said) and any("003.npz" in text for text in notes.said)
    assert any(remark.kind == "nonfinite" and "logs" in remark.tensors for remark in remarks(table))


def test_nothing_but_bad_batches(model, folder, tmp_path):
    with pytest.raises(TableError, match="every batch"):
        made(model, folder("bad", 0, 1, bad={0: 0.0, 1: np.nan}), tmp_path / "t.json", skip_bad=True)


def test_what_cannot_be_merged(model, folder, tmp_path):
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    table = made(model, folder("a", 0), Path(a))
    made(model, folder("b", 1), Path(b), method="mse")
    out = str(tmp_path / "m.json")
    with pytest.raises(UsageError, match="two tables"):
        merge([a], out, None)
    with pytest.raises(TableError, match="same data"):
        merge([a, a], out, None)
    with pytest.raises(TableError, match="different methods"):
        merge([a, b], out, None)
    with pytest.raises(TableError, match="best"):
        merge([a, b], out, "best")
    with pytest.raises(UsageError, match="no method 'average'"):
        merge([a, b], out, "average")
    for change, message in (
        ({"model_sha256": "f" * 64}, "another model"),
        ({"tensors": {"hidden": table.tensors["hidden"]}}, "different tensors"),
    ):
        write_table(table.model_copy(update={**change, "data_sha256": "1" * 64}), Path(b))
        with pytest.raises(TableError, match=message):
            merge([a, b], out, "all")
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (None, None, "no histogram"),
        ("counts", ["1 2", "3"], "damaged"),
        ("counts", ["x", ""], "damaged"),
        ("energy", "1/0", "damaged"),
        ("exponents", [3, 3], "damaged"),
        ("half_absmax", [1e9, 1e9], "damaged"),
    ],
)
def test_damaged_evidence_is_not_merged(model, folder, tmp_path, field, value, message):
    for name, seed in (("a", 0), ("b", 1)):
        made(model, folder(name, seed), tmp_path / f"{name}.json")
    content = json.loads((tmp_path / "b.json").read_text())
    hidden = content["tensors"]["hidden"]
    hidden["evidence"] = None if field is None else {**hidden["evidence"], field: value}
    (tmp_path / "b.json").write_text(json.dumps(content))
    with pytest.raises(TableError, match=message):
        merge([str(tmp_path / "a.json"), str(tmp_path / "b.json")], str(tmp_path / "m.json"), None)


def test_min_max_is_what_the_data_really_take(model, folder, tmp_path):
    data = folder("all", 0, 1, 2)
    table = made(model, data, tmp_path / "t.json")
    loaded = load_model(str(model))
    expected = measure_ranges(loaded, tuple(table.tensors), open_feeds(str(data), loaded.inputs), Silent())
    for name, found in table.tensors.items():
        assert found.absmax == pytest.approx(expected[name].absmax, rel=1e-5)
        assert found.minimum == pytest.approx(expected[name].minimum, rel=1e-5, abs=1e-5)
        assert found.elements == expected[name].elements
    assert list(table.tensors) == ["logs", "hidden", "zeros", "ones", "turned"]


def test_odd_tensors_are_flagged(model, folder, tmp_path):
    table = made(model, folder("all", 0, 1, 2), tmp_path / "t.json")
    flags = {name: found.flags for name, found in table.tensors.items()}
    assert flags["zeros"] == ("zero",) and flags["ones"] == ("constant",)
    assert {cost.absmax for cost in table.tensors["ones"].methods.values()} == {1.0}
    assert table.scales("int8")["zeros"] == pytest.approx(1 / 127)
    assert {remark.kind for remark in remarks(table) if not remark.method} == {"zero", "constant"}
    assert table.tensors["zeros"].methods["entropy"].sqnr_db is None


def test_channels_of_convolutions_and_of_matrices(model, folder, tmp_path):
    data = folder("all", 0, 1)
    table = made(model, data, tmp_path / "t.json")
    logs = np.abs(np.log(np.concatenate([np.load(f)["x"] for f in sorted(data.iterdir())])))
    channels = np.array(table.tensors["logs"].channel_absmax.split(), np.float32)
    np.testing.assert_allclose(channels, logs.max(axis=(0, 2, 3)), rtol=1e-6)
    assert len(table.tensors["hidden"].channel_absmax.split()) == 8


def test_scales_of_each_method_and_format(model, folder, tmp_path):
    made(model, folder("all", 0, 1, 2), tmp_path / "t.json", method="percentile")
    table = read_table(tmp_path / "t.json")
    hidden = table.tensors["hidden"]
    wanted = hidden.methods["percentile_99.99"].absmax
    assert table.scales("int8")["hidden"] == pytest.approx(wanted / 127)
    assert table.scales("fp8")["hidden"] == pytest.approx(wanted / 448)
    for method in ("minmax", "entropy", "mse", "percentile_99"):
        limit = hidden.methods[method].absmax
        assert table.scales("int8", method)["hidden"] == pytest.approx(limit / 127)
    assert hidden.methods["minmax"].absmax == hidden.absmax
    with pytest.raises(TableError, match="--method best"):
        table.scales("int8", "best")


def test_a_plan_says_which_tensors_are_measured(model, folder, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema: trtdiag.plan/1\ndefault: int8\npins: [{match: conv, format: fp32, reason: measured}]\n"
    )
    table = made(model, folder("all", 0), tmp_path / "t.json", plan=str(plan))
    assert "logs" not in table.tensors and "hidden" in table.tensors
    plan.write_text("schema: trtdiag.plan/1\ndefault: fp16\n")
    with pytest.raises(Exception, match="quantizes no activation"):
        made(model, folder("b", 0), tmp_path / "t.json", plan=str(plan))


def test_halves_that_disagree_make_a_tensor_unstable(model, folder, tmp_path):
    table = made(model, folder("all", *range(6)), tmp_path / "t.json")
    assert sum(table.half_samples) == table.samples == 24
    unstable = [remark for remark in remarks(table) if remark.kind == "unstable"]
    assert any(remark.method == "minmax" and "logs" in remark.tensors for remark in unstable)
    one = made(model, folder("one", 0, samples=1), tmp_path / "one.json")
    assert one.tensors["logs"].methods["minmax"].halves_differ is None


def test_random_numbers_are_said(model, tmp_path):
    relu = onnx.load(model)
    relu.graph.node[0].op_type = "Abs"
    onnx.save(relu, tmp_path / "abs.onnx")
    for seed in (1, 2):
        made(tmp_path / "abs.onnx", f"random:{seed}", tmp_path / f"{seed}.json")
    merge([str(tmp_path / "2.json"), str(tmp_path / "1.json")], str(tmp_path / "m.json"), None)
    assert "RANDOM numbers (seed 1, 2)" in read_table(tmp_path / "m.json").data
