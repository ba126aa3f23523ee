"""The benchmark of builds tells of a case that failed or was stopped, and goes on with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_pins

DONE: dict[str, Any] = {
    "status": "done",
    "target": "cosine>=0.99",
    "met": True,
    "outcome": "repaired",
    "minimal": True,
    "builds": 4,
    "limit": 5,
    "pins": ["a", "b"],
    "emulated_pins": ["a"],
    "trials": [
        {"pins": ["a"], "values": "cosine 0.9", "met": False},
        {"pins": ["a", "b"], "values": "cosine 0.995", "met": True},
    ],
    "search_s": 12.0,
    "build_and_run_s": [1.0],
    "verdict": "holds",
    "proof": "1-minimal on builds",
}


def test_a_row_has_what_the_first_and_the_last_build_gave() -> None:
    found = {
        "machine": {"rehearsal": False, "versions": {}, "date": "2026-12-01", "gpus": ["H200"]},
        "cases": {"minilm-int8": DONE, "vit-int8": {"status": "stopped", "reason": "the time was up"}},
    }
    text = gpu_pins.markdown(found)
    row = next(line for line in text.splitlines() if line.startswith("| minilm-int8 |"))
    assert "cosine 0.9 | 2 | cosine 0.995 | 4 | 5 | 1-minimal on builds | 12 |" in row
    assert "stopped: the time was up" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {11}


@pytest.mark.parametrize(
    ("changes", "good"),
    [({}, True), ({"builds": 6}, False), ({"met": False}, False), ({"status": "failed"}, False)],
)
def test_what_is_good(changes: dict[str, Any], good: bool) -> None:
    assert gpu_pins._is_good(DONE | changes) is good


def test_cores_are_shared_by_weight() -> None:
    cases = list(gpu_pins.CASES)
    shares = [gpu_pins._cores(name, cases, range(16)) for name in cases]
    assert [list(share) for share in shares] == [[0, 1, 2, 3], [4, 5, 6, 7], list(range(8, 16))]
    assert list(gpu_pins._cores("minilm-int8", cases, [0, 1])) == [0, 1]  # too few: all of them


def test_a_case_that_was_killed_keeps_what_it_built(tmp_path: Path) -> None:
    diary = gpu_pins._Diary(tmp_path / "vit-int8.json", 0.0)
    diary.note("3 pins on tensorrt: misses")
    found = gpu_pins._collected(tmp_path, "vit-int8")
    assert found["status"] == "stopped"
    assert "3 pins" in found["notes"][0]
    assert gpu_pins._collected(tmp_path, "minilm-int8")["status"] == "failed"


def test_a_case_without_its_model_fails_alone(tmp_path: Path) -> None:
    """No model, no data: the process says so, and the files are written."""
    (tmp_path / "minilm.onnx").write_bytes(b"no model")
    code = gpu_pins.main(
        [
            "--models",
            str(tmp_path),
            "--data",
            str(tmp_path),
            "--out",
            str(tmp_path / "out"),
            "--cpu-rehearsal",
            "--only",
            "minilm-int8",
            "--minutes",
            "0.5",
        ]
    )
    assert code == 1
    case = json.loads((tmp_path / "out" / "gpu_pins.json").read_text())["cases"]["minilm-int8"]
    assert case["status"] == "failed"
    assert case["reason"]
    assert "failed" in (tmp_path / "out" / "gpu_pins.md").read_text()
