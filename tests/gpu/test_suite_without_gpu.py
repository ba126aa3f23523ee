"""The GPU suite's bookkeeping and table: what failed, what did not fit the time, what JSON cannot hold."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite import _Parts, plain
from benchmarks.gpu_table import markdown
from benchmarks.gpu_time import OutOfTime

GOOD = {"cosine": 0.99, "sqnr_db": 17.0, "rel_l2": 0.14, "nonfinite": 0, "top1": 0.98, "kl": 0.001}
LOST = {"cosine": "NaN", "sqnr_db": "-Infinity", "rel_l2": "Infinity", "nonfinite": 12}


def part(**changes: Any) -> dict[str, Any]:
    errors = {"format": GOOD, "engine": GOOD, "engine_vs_emulation": GOOD}
    return {
        "status": "done",
        "build_s": 3.0,
        "kernels": 50,
        "reformats": 4,
        "latency": {"median_ms": 0.231, "low_ms": 0.230, "high_ms": 0.233},
        "outputs": {"y": errors},
        "verdicts": {"y": {"kind": "format", "text": "the number format explains it"}},
        **changes,
    }


def found(**parts: Any) -> dict[str, Any]:
    machine = {
        "date": "2026-12-01",
        "gpus": ["NVIDIA H200"],
        "cores": 16,
        "versions": {"torch": "2.11"},
        "options": {"opt_level": 1},
        "rehearsal": False,
    }
    return {"machine": machine, "models": {"minilm": parts}}


def failed() -> dict[str, Any]:
    raise ValueError("no such thing")


def late() -> dict[str, Any]:
    raise OutOfTime("3 s left when the GPU was free")


def test_parts_are_kept_whatever_becomes_of_them(tmp_path: Path) -> None:
    parts = _Parts(tmp_path / "m.json", time.monotonic() + 100)
    assert parts.run("good", 10, lambda: {"value": math.inf})
    assert not parts.run("broken", 10, failed)
    assert not parts.run("long", 1000, lambda: {"value": 1})
    assert not parts.run("late", 10, late)
    kept = json.loads((tmp_path / "m.json").read_text())
    assert {name: p["status"] for name, p in kept.items()} == {
        "good": "done",
        "broken": "failed",
        "long": "skipped",
        "late": "skipped",
    }
    assert kept["good"]["value"] == "Infinity"
    assert kept["broken"]["reason"] == "ValueError: no such thing"
    assert "1000 s are needed" in kept["long"]["reason"]


def test_table_rows_and_what_is_said_under_them() -> None:
    text = markdown(
        found(
            int8=part(audit=["error: INT8 is absent"]),
            mend=part(pins=53, findings=["norm-square-overflow: a square"]),
            bf16={"status": "failed", "reason": "EngineError: out of memory"},
            fp8={"status": "skipped", "reason": "not supported yet"},
        )
    )
    assert "| int8 | 3.0 s | 50 (4) | 0.231 ms (0.230 to 0.233) | cos 0.990000, 17.0 dB, top-1 0.9800" in text
    assert "| mend (53 pins) |" in text
    assert "- bf16: failed: EngineError: out of memory" in text
    assert "- fp8: skipped: not supported yet" in text
    assert "- int8: error: INT8 is absent" in text
    assert "not measured on a GPU" not in text


def test_lost_values_have_a_row_too() -> None:
    errors = {"format": GOOD, "engine": LOST, "engine_vs_emulation": LOST}
    assert "cos nan, -inf dB, 12 not finite" in markdown(found(fp16=part(outputs={"y": errors})))


def test_json_has_no_nan() -> None:
    found = plain({"a": [math.nan, -math.inf, 1.5, True, None], 3: Path("x")})
    assert found == {"a": ["NaN", "-Infinity", 1.5, True, None], "3": "x"}
    json.dumps(found, allow_nan=False)
