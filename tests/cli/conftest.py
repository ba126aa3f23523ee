"""What the tests of the command line share: a small model with data, and the command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from ended import Ended

from diag.cli.main import run as run_command
from fixtures.graphs import bert, vit

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The words that start the real command as a process of its own."""
    return [sys.executable, "-m", "diag.cli.main"]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment in which this checkout is the one that runs, from any folder."""
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "100"}


@pytest.fixture
def process(command: list[str], environment: dict[str, str]) -> Callable[..., Ended]:
    """Runs the command as a user does."""

    def run(*words: object, **options: Any) -> Ended:
        done = subprocess.run(
            [*command, *map(str, words)],
            **{"env": environment, "capture_output": True, "text": True, "check": False, **options},
        )
        return Ended(done.returncode, done.stdout or "", done.stderr or "")

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT-like model, and its three batches in `data` beside it."""
    folder = tmp_path_factory.mktemp("bert")
    return _written(bert(), folder)


@pytest.fixture(scope="session")
def data(model: Path) -> Path:
    return model.parent / "data"


@pytest.fixture(scope="session")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT-like model, whose input is float, and its three batches in `data` beside it."""
    return _written(vit(), tmp_path_factory.mktemp("vit"))


def _written(fixture: Any, folder: Path) -> Path:
    onnx.save(fixture.model, folder / "model.onnx")
    (folder / "data").mkdir()
    for seed in range(3):
        np.savez(folder / "data" / f"{seed}.npz", **fixture.batch(2, seed))
    return folder / "model.onnx"


@pytest.fixture(scope="session")
def table(model: Path, data: Path) -> Path:
    """The model's calibration table."""
    path = model.parent / "table.json"
    with pytest.raises(SystemExit):
        run_command(["calibrate", str(model), "--data", str(data), "--out", str(path), "--quiet"])
    return path


@pytest.fixture(scope="session")
def report(model: Path, data: Path) -> Path:
    """A report of the model in INT8 (about 34 dB)."""
    out = model.parent / "out"
    words = ["compare", str(model), "--format", "int8", "--data", str(data), "--out", str(out), "--quiet"]
    with pytest.raises(SystemExit):
        run_command(words)
    return out / "report.json"
