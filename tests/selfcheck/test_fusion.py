"""Whether fusion is the cause: planted gaps, and healthy engines that must stay silent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diag.errors import EngineError
from diag.pipeline.engine.fusion import EXPERIMENTS, Experiment, fusion_finding, run_experiments

LEVEL, APART = EXPERIMENTS


def experiments(level: float, apart: float) -> list[Experiment]:
    return [Experiment(LEVEL, {"y": level}), Experiment(APART, {"y": apart})]


@pytest.mark.parametrize("shipped", [0.9, math.inf, math.nan])
def test_an_experiment_that_cures_names_fusion(shipped: float) -> None:
    finding = fusion_finding({"y": shipped}, experiments(0.5 if math.isfinite(shipped) else math.inf, 0.01))
    assert finding is not None
    assert finding.severity == "error"
    assert "fusion is the cause" in finding.title
    assert APART in finding.title


@pytest.mark.parametrize("shipped", [0.9, math.nan])
def test_no_cure_clears_fusion(shipped: float) -> None:
    finding = fusion_finding({"y": shipped}, experiments(shipped, shipped))
    assert finding is not None
    assert finding.severity == "note"
    assert "fusion is not the cause" in finding.title


def test_a_healthy_engine_is_not_accused() -> None:
    assert fusion_finding({"y": 0.003}, experiments(0.001, 0.002)) is None


def test_the_worst_output_is_asked_about() -> None:
    tried = [Experiment(LEVEL, {"y": 0.001, "z": 0.002})]
    finding = fusion_finding({"y": 0.003, "z": math.nan}, tried)
    assert finding is not None
    assert finding.evidence["output"] == "z"


def test_an_experiment_that_does_not_build_costs_only_its_answer() -> None:
    emulated = {"y": np.ones(4, np.float32)}
    notes: list[str] = []

    def build_and_run(name: str) -> dict[str, np.ndarray]:
        if name == "unfused":
            raise EngineError("no engine")
        return {"y": np.full(4, 1.5, np.float32)}

    done = run_experiments(build_and_run, emulated, notes.append)
    assert [(e.change, e.gaps) for e in done] == [(APART, {"y": pytest.approx(0.5)})]
    assert len(notes) == 1
    assert "no engine" in notes[0]
