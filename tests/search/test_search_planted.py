"""`pin` on real graphs with a planted culprit: the culprit, all of it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from diag.errors import NotEnoughEvidenceError
from diag.gate.threshold import parse_threshold
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.plan.schema import read_plan
from diag.progress import Silent
from fixtures.graphs import GRAPHS
from fixtures.graphs.faults import FAULTS, Planted

ONE_LAYER = [
    ("ffn-down-outlier", "bert"),
    ("ffn-down-outlier", "gpt2"),
    ("ffn-down-outlier", "llama"),
    ("ffn-down-outlier", "vit"),
    ("ffn-down-outlier", "conformer"),
    ("value-outlier", "bert"),
]
CHAINS = [
    ("norm-square-overflow", "gpt2"),
    ("norm-square-overflow", "llama"),
    ("swiglu-overflow", "llama"),
    ("qk-overflow", "bert"),
    ("qk-overflow", "vit"),
    ("tiny-eps", "llama"),
]


def pinned(planted: Planted, folder: Path, batches: int = 4) -> PinResult:
    model, data = folder / "model.onnx", folder / "data"
    onnx.save(planted.fixture.model, model)
    data.mkdir()
    for number in range(batches):
        np.savez(data / f"{number}.npz", **planted.fixture.batch(2, number))
    target = (parse_threshold("sqnr_db>=20"),)
    settings = SearchSettings(str(model), str(data), str(folder / "out"), target, format=planted.format)
    return pin_layers(settings, Silent())


@pytest.mark.parametrize(("fault", "family"), ONE_LAYER)
def test_a_single_culprit_is_the_only_pin(fault: str, family: str, tmp_path: Path) -> None:
    planted = FAULTS[fault](GRAPHS[family]())
    result = pinned(planted, tmp_path)
    assert (result.search.outcome, result.search.pins) == ("found", [planted.culprit])
    assert result.search.minimal
    assert all(metrics["sqnr_db"] >= 20 for metrics in result.held_out.values())


@pytest.mark.parametrize(("fault", "family"), CHAINS)
def test_an_overflow_is_pinned_from_its_birth_on(fault: str, family: str, tmp_path: Path) -> None:
    planted = FAULTS[fault](GRAPHS[family]())
    result = pinned(planted, tmp_path)
    chosen = {e.candidate.id: e.candidate.layers for e in result.ranking.effects}
    held = frozenset().union(*(chosen[pin] for pin in result.search.pins))
    assert result.search.outcome == "found"
    assert planted.culprit in held
    assert result.search.minimal
    # A norm holds up to ten layers; everything else in the graph, over eighty, stays in FP16.
    assert len(held) <= 10 * len(result.search.pins) < 60


def test_a_healthy_graph_needs_no_pin(tmp_path: Path) -> None:
    result = pinned(FAULTS["mask-constant"](GRAPHS["llama"]()), tmp_path)
    assert (result.search.outcome, result.search.pins) == ("not-needed", [])


def test_the_files_are_a_plan_that_holds(tmp_path: Path) -> None:
    planted = FAULTS["ffn-down-outlier"](GRAPHS["bert"]())
    pinned(planted, tmp_path)
    plan = read_plan(tmp_path / "out" / "plan.yaml")
    assert [pin.match for pin in plan.pins] == [planted.culprit]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"plan.yaml", "typed.onnx", "report.json", "report.html", "ranking.json"} <= names


def test_the_same_command_measures_nothing_twice(tmp_path: Path) -> None:
    planted = FAULTS["ffn-down-outlier"](GRAPHS["bert"]())
    first = pinned(planted, tmp_path)
    target = (parse_threshold("sqnr_db>=20"),)
    again = pin_layers(
        SearchSettings(
            str(tmp_path / "model.onnx"), str(tmp_path / "data"), str(tmp_path / "out"), target, format="int8"
        ),
        Silent(),
    )
    assert first.trials > 25
    assert again.trials == 0
    assert again.search.pins == first.search.pins


def test_one_batch_is_not_enough_to_choose_and_to_prove(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughEvidenceError, match="one batch cannot both choose pins and prove them"):
        pinned(FAULTS["ffn-down-outlier"](GRAPHS["bert"]()), tmp_path, batches=1)
