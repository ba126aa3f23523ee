"""Many processes, a cluster, an interruption: the same numbers, bit for bit."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from search_tools import Workplace, workplace

from diag.errors import NotEnoughEvidenceError, UsageError
from diag.pipeline.search.job import rank_layers
from diag.progress import Silent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    found = workplace(tmp_path_factory.mktemp("spread"))
    rank_layers(found.settings("alone"), Silent())
    return found


def ranking(place: Workplace, out: str) -> str:
    return (place.folder / out / "ranking.json").read_text()


def test_two_processes_rank_as_one_does(place: Workplace) -> None:
    table = str(place.folder / "alone" / "calibration.json")
    rank_layers(place.settings("jobs", calibration=table, jobs=2), Silent())
    assert ranking(place, "jobs") == ranking(place, "alone")


def test_two_processes_choose_the_pins_that_one_does(place: Workplace) -> None:
    table = str(place.folder / "alone" / "calibration.json")
    alone, both = (
        place.pin(out, calibration=table, jobs=jobs) for out, jobs in (("pin-alone", 1), ("pin-jobs", 2))
    )
    assert both.search.pins == alone.search.pins
    assert both.held_out == alone.held_out
    assert both.search.minimal
    assert _kept(place.folder / "pin-alone") <= _kept(place.folder / "pin-jobs")


def _kept(out: Path) -> set[tuple[str, str]]:
    """Every trial with its outcome, as written down."""
    return set(sqlite3.connect(out / ".trials.sqlite").execute("SELECT id, outcome FROM trials"))


def test_a_ray_cluster_ranks_as_one_process_does(place: Workplace) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    table = str(place.folder / "alone" / "calibration.json")
    rank_layers(place.settings("ray", calibration=table, ray="local"), Silent())
    assert ranking(place, "ray") == ranking(place, "alone")


def test_ray_that_is_not_installed_is_named(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="not installed"):
        rank_layers(place.settings("noray", ray="local"), Silent())


def test_a_killed_search_goes_on_and_loses_no_trial(place: Workplace) -> None:
    out = place.folder / "killed"
    command = [sys.executable, "-m", "diag.cli.main", "pin", place.model, "--format", "int8", "--quiet"]
    command += ["--data", place.data, "--target", "sqnr_db>=20", "--out", str(out)]
    running = subprocess.Popen(command)
    while _trials(out) < 20 and running.poll() is None:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    before = _trials(out)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    whole = place.pin("whole")
    assert done.returncode == 0
    assert json.loads(done.stdout)["pins"] == whole.search.pins
    # Trials of the killed run were taken up: together they are those of a run that nobody killed.
    assert json.loads(done.stdout)["trials"] <= whole.trials - before + 1


def _trials(out: Path) -> int:
    try:
        with sqlite3.connect(out / ".trials.sqlite") as store:
            return int(store.execute("SELECT COUNT(*) FROM trials").fetchone()[0])
    except sqlite3.Error:
        return 0


def test_data_that_cannot_tell_whether_the_target_holds_are_too_few(place: Workplace) -> None:
    """A target at the mean of the plain damages: some batches miss it, some meet it."""
    body = json.loads(ranking(place, "alone"))
    damages = body["totals"]
    assert len(damages) >= 2
    # Damage is 10 ** ((20 - sqnr) / 10): the bound at which the mean damage is 1.
    mean = sum(damages) / len(damages)
    bound = 20 - 10 * math.log10(mean)
    with pytest.raises(NotEnoughEvidenceError, match="cannot tell whether it holds") as raised:
        place.pin("few", target=f"sqnr_db>={bound:.4f}")
    assert raised.value.exit_code == 4
    assert "batches would" in str(raised.value)
