"""Cheap scores: exact where they can be, culprits among the first, with and without PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from ended import Ended
from onnx import TensorProto, helper, numpy_helper
from search_tools import workplace

from diag.engines.autograd import has_torch
from diag.gate.threshold import parse_threshold
from diag.pipeline.search import cheap, screen, setup
from diag.pipeline.search.cheap import CheapScores, mean_ranks
from diag.pipeline.search.order import order_scores, score
from diag.pipeline.search.screen import screened
from diag.pipeline.search.settings import SearchSettings
from diag.pipeline.search.setup import Search, set_up
from diag.progress import Silent
from diag.search.rank import Candidate

needs_torch = pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")

PLANTED = [
    ("ffn-down-outlier", "bert"),
    ("ffn-down-outlier", "llama"),
    ("ffn-down-outlier", "vit"),
    ("value-outlier", "bert"),
]


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def linear_search(folder: Path, outputs: int = 1, last: str = "Identity") -> Search:
    """Three products in a row, in INT8: 16 -> 32 -> 16 -> `outputs`."""
    random, sizes = np.random.default_rng(7), (16, 32, 16, outputs)
    weights = [random.standard_normal(pair).astype(np.float32) for pair in itertools.pairwise(sizes)]
    names = ["x", "h0", "h1", "h2"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"m{i}") for i in range(3)]
    nodes.append(helper.make_node(last, ["h2"], ["y"], name="last"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, outputs])],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "linear.onnx")
    (folder / "data").mkdir()
    for number in range(3):
        np.savez(folder / "data" / f"{number}.npz", x=random.standard_normal((1, 16)).astype(np.float32))
    target = (parse_threshold("sqnr_db>=30"),)
    settings = SearchSettings(
        str(folder / "linear.onnx"), str(folder / "data"), str(folder / "out"), target, format="int8"
    )
    return set_up(settings, Silent())


def measured(search: Search) -> dict[str, float]:
    """The damage that each candidate does alone on the first batch."""
    return {c.id: search.variants.damage(search.target, c.layers, 0) for c in search.candidates}


@needs_torch
def test_on_a_linear_model_the_prediction_is_the_damage(tmp_path: Path) -> None:
    search = linear_search(tmp_path)
    truth = measured(search)
    assert set(truth) == {"m0", "m1", "m2"}
    assert score(search, Silent()).gradient == pytest.approx(truth, rel=1e-3)


@needs_torch
def test_with_many_outputs_it_is_an_estimate_of_the_damage(tmp_path: Path) -> None:
    """16 probes: the standard deviation of each estimate is at most sqrt(2 / 16), a factor of 1.35."""
    search = linear_search(tmp_path, outputs=40)
    truth, found = measured(search), score(search, Silent()).gradient
    assert all(0.4 < found[name] / truth[name] < 2.1 for name in truth)


@needs_torch
def test_an_operator_without_gradient_leaves_the_other_scores_and_a_note(tmp_path: Path) -> None:
    notes = Notes()
    found = score(linear_search(tmp_path, last="Round"), notes)
    assert found.gradient == {}
    assert set(found.combined) == {"m0", "m1", "m2"}
    assert notes.notes == ["candidates are ordered by local errors: no gradient of operator Round is known."]


@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=needs_torch)])
@pytest.mark.parametrize(("fault", "family"), PLANTED)
def test_a_planted_culprit_is_among_the_first(
    fault: str, family: str, torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheap, "has_torch", lambda: torch)
    place = workplace(tmp_path, fault, family, batches=3)
    search = set_up(place.settings(), Silent())
    found = score(search, Silent())
    assert bool(found.gradient) == torch
    order = sorted(found.combined, key=lambda name: -found.combined[name])
    assert len(order) == len(search.candidates) > 10
    assert place.planted.culprit in order[: 1 if torch else 3]


def test_without_a_budget_nothing_is_scored(tmp_path: Path) -> None:
    search = linear_search(tmp_path)
    assert order_scores(search, Silent()) == {}
    limited = replace(search, settings=replace(search.settings, budget_s=60.0))
    assert set(order_scores(limited, Silent())) == {"m0", "m1", "m2"}


def test_the_crest_factor_is_that_of_the_calibration_data(
    tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    search = linear_search(tmp_path)
    assert score(search, Silent()).crest == {}  # ranges alone tell of no energy
    table = tmp_path / "table.json"
    ended = trtdiag("calibrate", search.settings.model, "--data", search.settings.data, "--out", table)
    assert ended.code == 0
    found = score(replace(search, table=str(table)), Silent())
    inputs = [np.load(path)["x"] for path in (tmp_path / "data").iterdir()]
    values = np.concatenate(inputs).astype(np.float64)
    assert found.crest["m0"] == pytest.approx(np.abs(values).max() / np.sqrt((values**2).mean()), rel=1e-5)
    if not found.gradient:
        assert found.combined == mean_ranks([found.local, found.crest])


def test_ranks_are_averaged() -> None:
    assert mean_ranks([{"a": 1.0, "b": math.inf, "c": 2.0}, {"a": 5.0, "b": 7.0, "c": 5.0}]) == {
        "a": (1 + 1.5) / 2,
        "b": 3.0,
        "c": (2 + 1.5) / 2,
    }


def test_what_destroys_values_comes_first() -> None:
    found = CheapScores({"a": math.inf, "b": 2.0, "c": 1.0}, crest={"a": 1.0, "b": 2.0, "c": 9.0})
    assert found.combined == {"a": math.inf, "b": 2.0, "c": 2.0}
    predicted = CheapScores({"a": math.inf, "b": 2.0}, gradient={"a": 0.0, "b": 3.0})
    assert predicted.combined == {"a": math.inf, "b": 3.0}


def test_a_budget_that_local_errors_spend_leaves_no_gradient(tmp_path: Path) -> None:
    notes = Notes()
    found = score(linear_search(tmp_path), notes, limit_s=0.0)
    assert found.gradient == {}
    why = (
        "the budget is too short for gradients"
        if has_torch()
        else "gradients, which order better, need PyTorch"
    )
    assert len(notes.notes) == 1
    assert why in notes.notes[0]
    assert found.combined.keys() == {"m0", "m1", "m2"}


def test_the_screen_keeps_what_destroys_values_and_the_largest_scores() -> None:
    ids = [f"l{n}" for n in range(400)]
    candidates = [Candidate(i, frozenset([i])) for i in ids]
    local = {i: float(n) for n, i in enumerate(ids)} | {"l3": math.inf, "l4": math.inf}
    kept = screened(candidates, CheapScores(local), Silent())
    assert [c.id for c in kept] == ["l3", "l4", *ids[-64:]]
    predicted = {i: -float(n) for n, i in enumerate(ids)} | {"l3": math.inf, "l4": math.inf}
    by_damage = screened(candidates, CheapScores(local, gradient=predicted), Silent())
    assert [c.id for c in by_damage] == ids[:66]


def test_a_spent_budget_shows_what_was_measured_and_counts_the_rest(
    tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    place = workplace(tmp_path, batches=3)
    words = ("rank", place.model, "--format", "int8", "--data", place.data, "--budget", "0.001s")
    ended = trtdiag(*words, "--out", tmp_path / "one", "--json")
    assert ended.json["worst"] == [place.planted.culprit]
    assert ended.json["unmeasured"] > 10
    shown = trtdiag(*words, "--out", tmp_path / "two").out
    assert f"{ended.json['unmeasured']} not measured within the budget" in " ".join(shown.split())


def test_a_screened_search_is_ordered_by_the_screen_and_handed_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "MOST_CANDIDATES", 10)
    monkeypatch.setattr(screen, "_KEPT", 6)
    place = workplace(tmp_path, batches=3)
    search = set_up(place.settings(budget_s=60.0), Silent())
    assert search.scores is not None
    destroyed = sum(map(math.isinf, search.scores.local.values()))  # the planted outlier zeroes whole rows
    assert len(search.candidates) == 6 + destroyed < len(search.scores.local)
    assert place.planted.culprit in search.ids
    monkeypatch.setattr(setup, "cheap_scores", None)  # nothing is scored again
    assert order_scores(search, Silent()) == search.scores.combined
    part = set_up(place.settings("part", budget_s=60.0), Silent(), search.candidates)
    assert part.candidates == search.candidates
    assert measured(part) == measured(search)
