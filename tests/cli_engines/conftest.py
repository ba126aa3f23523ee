"""Real kernel lists, a small model, and a way to run the command in this process."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import save_model

from diag.cli.main import run as run_command

SAMPLES = Path(__file__).resolve().parents[1] / "kernels" / "samples"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def trtdiag(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the command; an exception other than its end fails the test."""

    def run(*words: object) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command([str(word) for word in words])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return Ended(int(end.value.code or 0), out, err)

    return run


@pytest.fixture
def sample(tmp_path: Path) -> Callable[[str], Path]:
    """A real kernel list by its name without `.gz` (see tests/kernels/samples/README.md)."""

    def find(name: str) -> Path:
        packed = SAMPLES / f"{name}.gz"
        if not packed.is_file():
            return SAMPLES / name
        unpacked = tmp_path / name
        unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
        return unpacked

    return find


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three batches for the model: 8, 8 and 4 rows."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for number, rows in enumerate((8, 8, 4)):
        np.savez(folder / f"{number}.npz", x=rng.standard_normal((rows, 64)).astype(np.float32))
    return folder
