"""A planted model on disk, its data, and the search on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from diag.gate.threshold import parse_threshold
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.progress import Silent
from fixtures.graphs import GRAPHS
from fixtures.graphs.faults import FAULTS, Planted


@dataclass(frozen=True)
class Workplace:
    """Files of one planted model."""

    planted: Planted
    folder: Path

    @property
    def model(self) -> str:
        return str(self.folder / "model.onnx")

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def settings(self, out: str = "out", target: str = "sqnr_db>=20", **changes: Any) -> SearchSettings:
        bounds = (parse_threshold(target, ("score",)),)
        base = SearchSettings(
            self.model, self.data, str(self.folder / out), bounds, format=self.planted.format
        )
        return replace(base, **changes)

    def pin(self, out: str = "out", target: str = "sqnr_db>=20", **changes: Any) -> PinResult:
        return pin_layers(self.settings(out, target, **changes), Silent())


def workplace(
    folder: Path, fault: str = "ffn-down-outlier", family: str = "bert", batches: int = 4
) -> Workplace:
    """The planted model and its batches, written into `folder`."""
    planted = FAULTS[fault](GRAPHS[family]())
    onnx.save(planted.fixture.model, folder / "model.onnx")
    (folder / "data").mkdir()
    for number in range(batches):
        np.savez(folder / "data" / f"{number}.npz", **planted.fixture.batch(2, number))
    return Workplace(planted, folder)
