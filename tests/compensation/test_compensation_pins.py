"""`pin --compensate`: what scales can mend needs no pin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from compensation_graphs import HIDDEN, WIDTH, Graph, data, outlier_gamma, uniform
from ended import Ended


def planted(folder: Path) -> str:
    """Two projections behind one norm each; the first one's channel 3 is 128 times as large as it need be."""
    g = Graph()
    for name, size in (("bad", 128.0), ("good", 1.0)):
        weight = uniform(len(name), WIDTH, HIDDEN)
        weight[3] /= size
        inputs = [
            "x",
            g.constant(f"{name}/gamma", outlier_gamma(size)),
            g.constant(f"{name}/b", 0 * outlier_gamma(1)),
        ]
        g.add("LayerNormalization", inputs, f"{name}/norm", axis=-1)
        g.linear(name, f"{name}/norm", weight)
    g.add("Add", ["bad", "good"], "y")
    return g.saved(folder, ["y"])


def test_the_pin_of_a_planted_channel_becomes_unnecessary(
    tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    out = tmp_path / "out"
    words = ["pin", planted(tmp_path), "--data", data(tmp_path / "data", 9), "--format", "int8"]
    words += ["--target", "sqnr_db>=30", "--out", str(out), "--compensate"]
    ended = trtdiag(*words, "--json")
    assert ended.code == 0
    body = ended.json
    assert body["pins_without_compensation"] == ["bad"] == body["unnecessary_pins"]
    assert body["pins"] == []
    assert any(step["step"] == "smooth" and step["kept"] for step in body["steps"])
    report = json.loads((out / "report.json").read_text())
    notes = report["search"]["notes"]
    assert notes[-1] == "Pins needed without compensation: 1. Unnecessary now: 1: bad."
    assert any("(SmoothQuant): brought +" in note for note in notes)
    assert report["gate"]["passed"]


def test_options_of_one_model_are_refused(tmp_path: Path, trtdiag: Callable[..., Ended]) -> None:
    words = ["pin", planted(tmp_path), "--data", data(tmp_path / "data", 3), "--format", "int8"]
    words += [
        "--target",
        "sqnr_db>=30",
        "--out",
        str(tmp_path / "out"),
        "--compensate",
        "--ranking",
        "r.json",
    ]
    ended = trtdiag(*words)
    assert ended.code == 2
    assert "--ranking" in ended.err
