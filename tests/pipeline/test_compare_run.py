"""How a comparison runs: slices, resuming, memory, files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pipeline_tools import Notes, save_batches

import diag.pipeline.compare.run as run_module
from diag.pipeline.compare.job import STATE_FILE, compare
from diag.pipeline.settings import CompareSettings
from diag.report.io import dumps
from fixtures.graphs import Dims, bert, llama

CHECKOUT = Path(__file__).resolve().parents[2]


class Stop(Notes):
    """Progress that ends the run when so many batches are compared, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def advance(self, steps: int = 1) -> None:
        if self.stages[-1] == "comparing layers" and steps:
            self.left -= steps
            if self.left < 0:
                raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def kept_after_every_batch(monkeypatch):
    monkeypatch.setattr(run_module, "_SAVE_SHARE", 1e9)


@pytest.fixture
def settings(on_disk, tmp_path):
    model, data = on_disk(bert(), 6)
    return CompareSettings(model=model, data=data, out=str(tmp_path / "out"), format="int8")


def numbers(report):
    """A report without what may differ between two runs of the same thing."""
    body = json.loads(dumps(report))
    for key in ("command", "seconds", "started", "peak_memory_mb"):
        del body["run"][key]
    for finding in body["findings"]:
        del finding["mend"]["command"]
    return body


def stopped(settings, after=3):
    with pytest.raises(KeyboardInterrupt):
        compare(settings, Stop(after))
    assert (Path(settings.out) / STATE_FILE).is_file()


def changed(settings, **options):
    return CompareSettings(**{**vars_of(settings), **options})


def vars_of(settings):
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def is_resumed(settings):
    notes = Notes()
    report = compare(settings, notes)
    assert not (Path(settings.out) / STATE_FILE).exists()
    return any("resumed" in note for note in notes.notes), report


def test_a_stopped_run_equals_one_that_was_not(settings, tmp_path):
    whole = compare(changed(settings, out=str(tmp_path / "whole")), Notes())
    stopped(settings)
    resumed, report = is_resumed(settings)
    assert resumed
    assert numbers(report) == numbers(whole)


def test_a_run_may_stop_again_and_again(settings, tmp_path):
    whole = compare(changed(settings, out=str(tmp_path / "whole")), Notes())
    for after in (1, 2, 3, 5):
        stopped(settings, after)
    resumed, report = is_resumed(settings)
    assert resumed
    assert numbers(report) == numbers(whole)


def test_other_slices_may_go_on(settings):
    stopped(settings)
    assert is_resumed(changed(settings, slice_mb=1))[0]


def test_another_format_begins_anew(settings):
    stopped(settings)
    resumed, report = is_resumed(changed(settings, format="fp16"))
    assert not resumed
    assert report.run.batches == 6


def test_another_plan_begins_anew(settings, tmp_path):
    stopped(settings)
    (tmp_path / "plan.yaml").write_text(
        "schema: trtdiag.plan/1\ndefault: int8\npins: [{role: pv_matmul, format: fp16}]\n"
    )
    assert not is_resumed(changed(settings, format=None, plan=str(tmp_path / "plan.yaml")))[0]


def test_other_data_begin_anew(settings):
    stopped(settings)
    np.savez(Path(settings.data) / "005.npz", **bert().batch(2, 77))
    assert not is_resumed(settings)[0]


def test_fewer_batches_begin_anew(settings):
    stopped(settings)
    resumed, report = is_resumed(changed(settings, limit=4))
    assert not resumed
    assert report.run.batches == 4


def test_another_table_begins_anew(settings, tmp_path):
    from diag.pipeline.calibrate.tables import calibrate_model

    other = save_batches(tmp_path / "other", [bert().batch(2, 50)])
    calibrate_model(settings.model, str(other), str(tmp_path / "table.json"), None, Notes())
    stopped(settings)
    assert not is_resumed(changed(settings, calibration=str(tmp_path / "table.json")))[0]


def test_another_model_begins_anew(settings, tmp_path):
    import onnx

    stopped(settings)
    onnx.save(bert(seed=1).model, settings.model)
    assert not is_resumed(settings)[0]


def test_the_user_may_refuse_to_resume(settings):
    stopped(settings)
    notes = Notes()
    compare(changed(settings, resume=False), notes)
    assert notes.notes == []


def test_a_state_that_is_no_state_is_passed_over(settings):
    Path(settings.out).mkdir()
    for content in (b"", b"PK\x03\x04 broken", b"\x93NUMPY"):
        (Path(settings.out) / STATE_FILE).write_bytes(content)
        assert not is_resumed(settings)[0]


@pytest.mark.parametrize("fmt", ["int8", "fp16"])
@pytest.mark.parametrize("make", [bert, llama])
def test_slices_change_no_number(compared, monkeypatch, tmp_path, make, fmt):
    counts = []
    original = run_module.SlicedRun.run

    def counting(self, feed):
        counts.append(self.count)
        return original(self, feed)

    monkeypatch.setattr(run_module.SlicedRun, "run", counting)
    fixture = make()
    batches = [fixture.batch(48, seed) for seed in range(2)]
    whole = compared(fixture, fmt, batches, slice_mb=256)
    cut = compared(fixture, fmt, batches, slice_mb=1, out=str(tmp_path / "cut"))
    assert counts[0] == 1
    assert counts[-1] >= 8
    assert numbers(cut) == numbers(whole)


def test_two_runs_give_the_same_report(settings, tmp_path):
    first = compare(settings, Notes())
    second = compare(changed(settings, out=str(tmp_path / "second")), Notes())
    assert numbers(first) == numbers(second)


def test_the_order_of_files_is_natural(settings, tmp_path):
    """b2 before b10: the worst batch's number means the same file."""
    folder = tmp_path / "named"
    folder.mkdir()
    for number, name in enumerate(("b1", "b2", "b10")):
        shutil.copy(Path(settings.data) / f"{number:03d}.npz", folder / f"{name}.npz")
    report = compare(changed(settings, data=str(folder)), Notes())
    again = compare(changed(settings, limit=3, out=str(tmp_path / "again")), Notes())
    assert report.outputs[0].worst == again.outputs[0].worst


MEMORY = """
import json, sys
from diag.pipeline.compare.job import compare
from diag.pipeline.settings import CompareSettings
from diag.progress import Silent
model, data, out, fmt = sys.argv[1:]
report = compare(CompareSettings(model=model, data=data, out=out, format=fmt, slice_mb=8), Silent())
print(report.run.peak_memory_mb, report.run.batches)
"""


@pytest.mark.parametrize("fmt", ["int8", "fp16"])
def test_memory_does_not_grow_with_the_batches(on_disk, tmp_path, fmt):
    """Activations of one batch are tens of MB here; 28 more batches would show."""
    fixture = bert(Dims(hidden=64, seq_len=64))
    peaks = {}
    for count in (4, 32):
        model, _ = on_disk(fixture, 1)
        data = save_batches(tmp_path / f"data{count}", [fixture.batch(16, seed) for seed in range(count)])
        words = [sys.executable, "-c", MEMORY, model, str(data), str(tmp_path / f"out{count}"), fmt]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        peak, batches = done.stdout.split()
        assert int(batches) == count
        peaks[count] = float(peak)
    assert peaks[32] < 1.1 * peaks[4], peaks
