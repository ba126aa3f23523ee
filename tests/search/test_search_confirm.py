"""The final plan on an engine: built and audited by TensorRT-RTX's compiler, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from search_tools import workplace

from diag.cli.search_options import engine_of
from diag.errors import UsageError


def test_the_plan_is_built_and_audited(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    place = workplace(tmp_path)
    found = place.pin(confirm="tensorrt-rtx")
    assert found.met
    assert found.on_engine is True
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["kernels"]
    assert report["search"]["points"]
    assert (tmp_path / "out" / "model.engine").is_file()


def test_without_confirming_nothing_is_said_of_an_engine(tmp_path: Path) -> None:
    assert workplace(tmp_path).pin().on_engine is None


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no engine"):
        engine_of("openvino")
