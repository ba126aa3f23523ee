"""The user's own metric: named by the target, computed with labels, blamed when it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from search_tools import Workplace, workplace

from diag.errors import DataError, UsageError
from diag.gate.threshold import parse_threshold
from diag.pipeline.search.job import rank_layers
from diag.pipeline.search.user_metric import measure_own, open_metric
from diag.progress import Silent

SCORE = """
import numpy as np

def score(outputs, labels):
    y = next(iter(outputs.values()))
    return 1.0 - float(np.linalg.norm(y - labels["expected"]) / np.linalg.norm(labels["expected"]))
"""


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Each batch holds the FP32 outputs as labels, so that the score is 1 minus the relative L2 error."""
    import onnxruntime as ort

    place = workplace(tmp_path_factory.mktemp("own"))
    session = ort.InferenceSession(place.model, providers=["CPUExecutionProvider"])
    for file in Path(place.data).iterdir():
        batch = dict(np.load(file))
        np.savez(file, **batch, expected=session.run(None, batch)[0])
    (place.folder / "own.py").write_text(SCORE)
    return place


def test_pins_meet_the_users_own_metric(labelled: Workplace) -> None:
    found = labelled.pin("own", "score>=0.9", metric=f"{labelled.folder}/own.py:score")
    assert found.met
    assert found.search.pins == [labelled.planted.culprit]
    report = json.loads((labelled.folder / "own" / "report.json").read_text())
    check = report["gate"]["checks"][-1]
    assert (check["name"], check["passed"]) == ("score>=0.9", True)
    # The score is by construction 1 minus the relative L2 error of the first output.
    metrics = next(iter(found.held_out.values()))
    assert check["value"] == pytest.approx(1 - metrics["rel_l2"], abs=0.02)


def test_a_batch_that_misses_even_in_fp32_is_judged_with_all_the_others(labelled: Workplace) -> None:
    """The batch held out is worth 0.93 at best, and the target of 0.95 holds over all four."""
    scored = SCORE.replace("1.0 -", "labels['best'] -")
    (labelled.folder / "best.py").write_text(scored)
    data = labelled.folder / "hard"
    data.mkdir()
    files = sorted(Path(labelled.data).iterdir())
    for number, file in enumerate(files):
        np.savez(data / file.name, **np.load(file), best=0.93 if number == len(files) - 1 else 1.0)
    found = labelled.pin("hard_out", "score>=0.95", metric=f"{labelled.folder}/best.py:score", data=str(data))
    assert (found.search.outcome, found.search.used_held_out, found.met) == ("found", True, True)
    assert labelled.planted.culprit in found.search.pins
    assert found.held_out["(own metric)"]["reference"] == pytest.approx((3 * 1.0 + 0.93) / 4)
    assert "measured on all batches" in found.proof
    assert found.all_batches


def test_a_target_that_fp32_itself_misses_is_said_at_once(labelled: Workplace) -> None:
    found = labelled.pin("never", "score>=1.5", metric=f"{labelled.folder}/own.py:score")
    assert not found.met
    assert found.trials == 0
    assert "not even the model in FP32" in found.verdict


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(outputs, labels):\n    return float('nan')\n", "gave nan"),
        ("def score(outputs, labels):\n    raise KeyError('who')\n", "line 2: KeyError"),
        ("def score(outputs, labels):\n    return 'good'\n", "not a number"),
        ("def other(outputs, labels):\n    return 1.0\n", "defines no function score"),
    ],
)
def test_a_metric_that_fails_is_one_sentence_and_exit_code_2(
    labelled: Workplace, code: str, said: str
) -> None:
    (labelled.folder / "bad.py").write_text(code)
    command = [sys.executable, "-m", "diag.cli.main", "pin", labelled.model, "--format", "int8"]
    command += ["--data", labelled.data, "--target", "score>=0.9", "--out", str(labelled.folder / "bad")]
    done = subprocess.run(
        [*command, "--metric", f"{labelled.folder}/bad.py:score", "--quiet"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_labels_are_refused_where_no_metric_reads_them(labelled: Workplace) -> None:
    with pytest.raises(DataError, match="expected"):
        labelled.pin("plain")


def test_trials_of_another_function_in_the_same_file_are_not_taken(labelled: Workplace) -> None:
    (labelled.folder / "two.py").write_text(SCORE + "\n\ndef worse(outputs, labels):\n    return [][0]\n")
    first = labelled.settings("two", "score>=0.9", metric=f"{labelled.folder}/two.py:score")
    rank_layers(first, Silent())
    worse = (parse_threshold("worse>=0.9", ("worse",)),)
    with pytest.raises(DataError, match="IndexError"):
        rank_layers(replace(first, metric=f"{labelled.folder}/two.py:worse", target=worse), Silent())


def test_a_metric_that_no_target_names_is_refused(labelled: Workplace) -> None:
    with pytest.raises(UsageError, match="no target names 'score'"):
        labelled.pin("unnamed", "cosine>=0.9", metric=f"{labelled.folder}/own.py:score")


def test_a_target_on_a_metric_that_nobody_computes_is_refused(labelled: Workplace) -> None:
    with pytest.raises(UsageError, match="nothing computes"):
        labelled.pin("nobody", "score>=0.9")


@pytest.mark.parametrize("spec", ["own.py", "nothere.py:score", "own.py:not a name"])
def test_a_malformed_metric_is_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        open_metric(spec)


def test_a_name_of_trtdiags_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def cosine(outputs, labels):\n    return 1.0\n")
    with pytest.raises(UsageError, match="trtdiag's own"):
        open_metric(f"{tmp_path}/m.py:cosine")


def test_the_mean_is_over_samples(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def size(outputs, labels):\n    return float(outputs['y'].sum())\n")
    metric = open_metric(f"{tmp_path}/m.py:size")
    parts = [np.full((rows, 1), value) for rows, value in ((1, 2.0), (3, 1.0))]
    first, second = (measure_own(metric, {"y": 2 * y}, {"y": y}, {}) for y in parts)
    assert (first + second).metrics() == {"size": (1 * 2 + 3 * 3) / 4, "reference": (1 * 4 + 3 * 6) / 4}
