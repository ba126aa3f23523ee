"""What `rank` says on a terminal and in JSON: units, roles, and why the work ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from ended import Ended

from diag.pipeline.search.ranking_file import stopped_by
from diag.search.rank import Candidate, Effect, ranking_of
from fixtures.graphs import GRAPHS
from fixtures.graphs.faults import FAULTS


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rank")
    planted = FAULTS["ffn-down-outlier"](GRAPHS["bert"]())
    onnx.save(planted.fixture.model, folder / "model.onnx")
    (folder / "data").mkdir()
    for number in range(3):
        np.savez(folder / "data" / f"{number}.npz", **planted.fixture.batch(2, number))
    model, data = str(folder / "model.onnx"), str(folder / "data")
    return ["rank", model, "--format", "int8", "--data", data, "--out", str(folder / "out")]


def test_the_table_shows_roles_units_and_why_the_work_ended(
    arguments: list[str], trtdiag: Callable[..., Ended]
) -> None:
    shown = " ".join(trtdiag(*arguments).out.split())
    assert "layer role block lowered alone raised alone spread batches" in shown
    assert "ffn_down 0" in shown
    assert "MatMul_19 qkv_proj 0" in shown
    assert "Damage: 1 is what sqnr_db>=30 allows; with all lowered it is " in shown
    assert "Work ended because " in shown


def test_json_has_the_same(arguments: list[str], trtdiag: Callable[..., Ended]) -> None:
    body = trtdiag(*arguments, "--json").json
    first = body["groups"][0]
    assert (first["role"], first["block"], first["layers"]) == ("ffn_down", 0, [body["worst"][0]])
    assert first["lowered_damage"] > 100 * body["groups"][1]["lowered_damage"]
    assert body["target"] == "sqnr_db>=30"
    written = json.loads(Path(body["ranking"]).read_text())
    assert written["stopped"] == body["stopped"]
    assert [row["batches"] for row in written["groups"]] == [len(row["lowered"]) for row in written["groups"]]


def test_why_the_work_ended() -> None:
    effects = [Effect(Candidate(name, frozenset({name}))) for name in "abc"]
    effects[0].lowered, effects[0].raised = [1.0], [1.0]
    assert stopped_by(ranking_of(effects, [1.0], False)) == "time ran out: 2 not measured within the budget"
    assert stopped_by(ranking_of(effects[:1], [1.0], True)) == "the order of what matters is settled"
    assert stopped_by(ranking_of(effects[:1], [1.0], False)).startswith("no batch or no time was left")
