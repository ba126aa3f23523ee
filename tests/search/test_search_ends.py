"""Both ends of a search are looked at before anything is ranked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from search_tools import Workplace, workplace

from diag.pipeline.search.job import rank_layers
from diag.progress import Silent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return workplace(tmp_path_factory.mktemp("ends"))


def test_a_target_that_holds_already_is_said_after_one_trial_a_batch(place: Workplace) -> None:
    result = place.pin("holds", "sqnr_db>=0.1")
    assert (result.search.outcome, result.search.pins, result.met) == ("not-needed", [], True)
    assert "holds without any pin" in result.verdict
    # Four batches, and random data, which no pin has to be held against.
    assert result.trials <= 5
    assert not (place.folder / "holds" / "ranking.json").exists()


def test_a_target_that_no_pin_reaches_is_said_after_both_ends(place: Workplace, tmp_path: Path) -> None:
    """The culprit itself is switched off in the ranking, so that it stays lowered."""
    rank_layers(place.settings("ranked"), Silent())
    file = place.folder / "ranked" / "ranking.json"
    ranking = json.loads(file.read_text())
    ranking["groups"][0]["enabled"] = False
    edited = tmp_path / "ranking.json"
    edited.write_text(json.dumps(ranking))
    table = str(place.folder / "ranked" / "calibration.json")
    result = place.pin("missed", "sqnr_db>=20", ranking=str(edited), calibration=table)
    assert (result.search.outcome, result.met) == ("impossible", False)
    assert "even with every candidate raised" in result.verdict
    assert ranking["groups"][0]["layers"][0] in result.verdict
    assert result.trials <= 2 * 4 + 1


def test_a_target_between_the_ends_is_searched(place: Workplace) -> None:
    result = place.pin("searched")
    assert result.search.outcome == "found"
    assert (place.folder / "searched" / "ranking.json").exists()


def test_a_spent_budget_has_measured_the_likeliest_first_and_says_what_it_left_out(place: Workplace) -> None:
    ranking = rank_layers(place.settings("hurried", budget_s=1e-6), Silent())
    assert (ranking.batches, ranking.settled) == (1, False)
    assert ranking.unmeasured == len(ranking.effects) - 1
    assert ranking.effects[0].candidate.id == place.planted.culprit
