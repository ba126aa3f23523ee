"""Real kernel lists (see samples/README.md), unpacked where they are compressed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def sample(tmp_path: Path) -> Callable[[str], Path]:
    """Path of a sample by its name without `.gz`."""

    def find(name: str) -> Path:
        packed = SAMPLES / f"{name}.gz"
        if not packed.is_file():
            return SAMPLES / name
        unpacked = tmp_path / name
        unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
        return unpacked

    return find
