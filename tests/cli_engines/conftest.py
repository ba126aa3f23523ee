"""Real kernel lists, and a small model with data."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_models import save_model

SAMPLES = Path(__file__).resolve().parents[1] / "kernels" / "samples"


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
