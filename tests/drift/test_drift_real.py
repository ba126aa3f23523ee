"""Drift on a packaged model: English calibrates MiniLM, and other texts are production."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diag.cli.main import run as run_command
from diag.errors import DataError, ModelError
from diag.report.drift import Drift
from diag.report.io import read_report
from fixtures.real import text_models


def exported(make: Callable[[], Path]) -> Path:
    try:
        return make()
    except (ModelError, DataError) as missing:
        pytest.skip(str(missing))


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command([*map(str, words), "--quiet"])
    assert not ended.value.code


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drift]:
    """Drift of one of the corpora against a table of 64 English sentences."""
    root = tmp_path_factory.mktemp("drift")
    model = exported(text_models.minilm)
    run(
        "calibrate",
        model,
        "--data",
        exported(lambda: text_models.minilm_data("en_calib")),
        "--out",
        root / "t.json",
    )

    def drift(corpus: str) -> Drift:
        stats, data = root / f"{corpus}.stats", exported(lambda: text_models.minilm_data(corpus))
        words = ["--data", data, "--calibration", root / "t.json", "--limit", 6]
        run("profile", model, *words, "--out", stats)
        run("drift", root / "t.json", stats, "--out", root / corpus)
        found = read_report(root / corpus / "report.json").drift
        assert found is not None
        return found

    return drift


@pytest.mark.export
def test_held_out_english_is_silent(production: Callable[[str], Drift]) -> None:
    assert production("en").level == "ok"


@pytest.mark.export
def test_numbers_drift(production: Callable[[str], Drift]) -> None:
    found = production("num")
    assert found.level == "fail"
    assert len(found.consequences) > 5
    assert found.advice[0].action == "recalibrate"


@pytest.mark.export
def test_german_drifts_in_shape_and_not_in_range(production: Callable[[str], Drift]) -> None:
    """Hardly anything is clipped, and largest values are as on held-out English: values lie elsewhere."""
    found = production("de")
    assert found.level == "warn"
    assert all(tensor.figures["saturation"].value < 1e-4 for tensor in found.tensors)
    assert sum(tensor.absmax_ratio > 1.2 for tensor in found.tensors) <= 2
