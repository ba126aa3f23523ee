"""What the tests of the pipeline share: fixture graphs on disk, and comparisons of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from pipeline_tools import save_batches

from diag.pipeline.compare.job import compare
from diag.pipeline.settings import CompareSettings
from diag.progress import Silent
from diag.report.schema import Report
from fixtures.graphs import GraphFixture


@pytest.fixture
def on_disk(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Writes a fixture and its batches; the model's path and the data's."""

    def write(fixture: GraphFixture, batches: int | Sequence[Any] = 3) -> tuple[str, str]:
        onnx.save(fixture.model, tmp_path / f"{fixture.name}.onnx")
        made = [fixture.batch(2, seed) for seed in range(batches)] if isinstance(batches, int) else batches
        return str(tmp_path / f"{fixture.name}.onnx"), str(
            save_batches(tmp_path / f"{fixture.name}-data", made)
        )

    return write


@pytest.fixture
def compared(on_disk: Callable[..., tuple[str, str]], tmp_path: Path) -> Callable[..., Report]:
    """Compares a fixture; options are those of CompareSettings, `batches` a number or the batches."""

    def run(fixture: GraphFixture, fmt: str | None = None, batches: Any = 3, **options: Any) -> Report:
        model, data = on_disk(fixture, batches)
        progress = options.pop("progress", Silent())
        settings = {"out": str(tmp_path / "out"), "format": fmt, **options}
        return compare(CompareSettings(model=model, data=data, **settings), progress)

    return run
