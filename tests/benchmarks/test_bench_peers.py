"""The benchmark's own instrument, and how it turns runs into ratios and targets."""

import subprocess
import sys

from benchmarks.compare_peers import Run, table, targets
from benchmarks.measure import Limits, measured

GENEROUS = Limits(seconds=60, memory_gb=4)


def python(code, limits, folder):
    return measured([sys.executable, "-c", code], limits, folder)


def test_time_memory_and_the_last_object_are_of_the_process(tmp_path):
    code = "import time; x = bytearray(200_000_000); time.sleep(0.3); print('noise'); print('{\"n\": 3}')"
    run = python(code, GENEROUS, tmp_path)
    assert (run.status, run.detail) == ("ok", {"n": 3})
    assert 0.3 < run.wall_s < 20
    assert 200 < run.peak_mb < 300


def test_a_long_object_is_whole_and_a_failure_keeps_what_was_printed(tmp_path):
    code = "import json; print(json.dumps({'pins': ['layer'] * 1000})); raise SystemExit('missed')"
    run = python(code, GENEROUS, tmp_path)
    assert (run.status, run.detail["reason"]) == ("failed", "missed")
    assert run.detail["pins"] == ["layer"] * 1000


def test_memory_of_a_child_counts(tmp_path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'bytearray(200_000_000)'])"
    assert python(code, GENEROUS, tmp_path).peak_mb > 200


def test_memory_of_this_process_does_not_count(tmp_path):
    ballast = bytearray(300_000_000)
    assert python("pass", GENEROUS, tmp_path).peak_mb < 100
    assert len(ballast)


def test_how_runs_end(tmp_path):
    slow = python("import time; time.sleep(60)", Limits(0.3, 4), tmp_path)
    assert slow.status == "timeout"
    assert slow.wall_s < 30
    code = "import time; time.sleep(0.2); bytearray(2_000_000_000)"
    assert python(code, Limits(60, 1), tmp_path).status == "memory"
    broken = python("raise SystemExit('no such model')", GENEROUS, tmp_path)
    assert (broken.status, broken.detail) == ("failed", {"reason": "no such model"})


def run(tool, batches, status, wall_s, peak_mb):
    return Run("minilm", tool, batches, status, wall_s, peak_mb, {"reason": "x|y"})


RUNS = [
    run("bare", 8, "ok", 10, 500),
    run("polygraphy", 8, "memory", 210, 16000),
    run("qdq-loss-debug", 8, "failed", 1, 1),
    run("trtdiag", 8, "ok", 14, 400),
    run("trtdiag", 64, "ok", 70, 480),
]


def test_table_shows_multiples_and_lower_bounds():
    rows = table(RUNS).splitlines()[2:]
    assert [row.split(" | ")[3:] for row in rows] == [
        ["10.0 s", "0.71", "500 MB", "1.25 |"],
        ["> 210.0 s", "> 15.00", "> 16000 MB", "> 40.00 |"],
        ["failed", "", "x/y", " |"],
        ["14.0 s", "1.00", "400 MB", "1.00 |"],
        ["70.0 s", "5.00", "480 MB", "1.20 |"],
    ]


def test_targets_leave_failed_peers_out():
    assert targets(RUNS) == [
        "- minilm: time over bare runs 1.40 (<= 1.5): met",
        "- minilm: times faster than polygraphy 15.00 (>= 5): met",
        "- minilm: times less memory than polygraphy 40.00 (>= 5): met",
        "- minilm: memory at 64 over 8 batches 1.20 (<= 1.1): MISSED",
    ]


def test_every_peer_has_its_command():
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare_peers", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(tool in shown.stdout for tool in ("bare", "polygraphy-kept", "qdq-loss-debug", "trtdiag"))
