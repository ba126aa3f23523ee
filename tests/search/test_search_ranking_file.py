"""A ranking handed back: taken as it is, edited, and refused when it is stale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from search_tools import Workplace, workplace

from diag.errors import UsageError
from diag.pipeline.search.job import rank_layers
from diag.progress import Silent


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = workplace(tmp_path_factory.mktemp("ranking"))
    rank_layers(place.settings("ranked"), Silent())
    return place


def body(place: Workplace) -> dict[str, Any]:
    return json.loads((place.folder / "ranked" / "ranking.json").read_text())  # type: ignore[no-any-return]


def edited(place: Workplace, name: str, value: dict[str, Any]) -> str:
    path = place.folder / f"{name}.json"
    path.write_text(json.dumps(value))
    return str(path)


def table(place: Workplace) -> str:
    return str(place.folder / "ranked" / "calibration.json")


def test_an_untouched_ranking_spares_the_measuring_and_gives_the_same_pins(ranked: Workplace) -> None:
    plain = ranked.pin("plain", calibration=table(ranked))
    again = ranked.pin("again", calibration=table(ranked), ranking=edited(ranked, "same", body(ranked)))
    assert again.search.pins == plain.search.pins == [ranked.planted.culprit]
    assert again.trials < plain.trials - len(plain.ranking.effects)


def test_a_layer_switched_off_stays_lowered(ranked: Workplace) -> None:
    value = body(ranked)
    row = next(r for r in value["groups"] if ranked.planted.culprit in r["layers"])
    row["enabled"] = False
    found = ranked.pin("off", calibration=table(ranked), ranking=edited(ranked, "off", value))
    assert ranked.planted.culprit not in found.search.pins
    assert not found.met
    assert ranked.planted.culprit in found.verdict  # named as what holds the target back


def test_a_group_that_was_drawn_is_measured_and_pinned_as_one(ranked: Workplace) -> None:
    value = body(ranked)
    rows = value["groups"]
    at = next(i for i, r in enumerate(rows) if ranked.planted.culprit in r["layers"])
    other = next(r for r in rows if len(r["layers"]) == 1 and r is not rows[at])
    rows.remove(other)
    rows[at if rows[at : at + 1] else 0]["layers"] = [ranked.planted.culprit, *other["layers"]]
    value["groups"] = [r for r in rows if r["layers"]]
    found = ranked.pin("drawn", calibration=table(ranked), ranking=edited(ranked, "drawn", value))
    assert found.search.pins == [ranked.planted.culprit]
    plan = (ranked.folder / "drawn" / "plan.yaml").read_text()
    assert ranked.planted.culprit in plan
    assert other["layers"][0] in plan


def test_a_stale_ranking_is_refused(ranked: Workplace) -> None:
    path = edited(ranked, "stale", body(ranked))
    more = ranked.folder / "more"
    shutil.copytree(ranked.data, more)
    (more / "0.npz").unlink()
    with pytest.raises(UsageError, match="other weights, plan, table or data"):
        ranked.pin("stale", calibration=table(ranked), ranking=path, data=str(more))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(schema="other/1"), "is no trtdiag.ranking/1 file"),
        (lambda v: v.update(groups=[]), "is no trtdiag.ranking/1 file"),
        (lambda v: v["groups"][0].update(layers=["nowhere"]), "which the plan does not lower"),
        (lambda v: v["groups"].append(v["groups"][0]), "twice"),
        (lambda v: [r.update(enabled=False) for r in v["groups"]], "switched off"),
    ],
)
def test_a_malformed_ranking_is_refused_with_the_reason(ranked: Workplace, change: Any, said: str) -> None:
    value = body(ranked)
    change(value)
    with pytest.raises(UsageError, match=said):
        ranked.pin("bad", calibration=table(ranked), ranking=edited(ranked, "bad", value))


def test_a_file_that_is_missing_or_no_json_is_refused(ranked: Workplace, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    for path in (tmp_path / "x.json", tmp_path / "none.json"):
        with pytest.raises(UsageError):
            ranked.pin("broken", calibration=table(ranked), ranking=str(path))
