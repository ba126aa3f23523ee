"""Progress that remembers, and batches on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diag.progress import Silent


class Notes(Silent):
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []

    def start(self, stage: str, total: int | None) -> None:
        self.stages.append(stage)

    def note(self, text: str) -> None:
        self.notes.append(text)


def save_batches(folder: Path, batches: Sequence[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        np.savez(folder / f"{number:03d}.npz", **batch)
    return folder
