"""A small model with its calibration table and data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from profile_tools import samples, small_model

from diag.cli.main import run as run_command


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: model.onnx, calibration/ (4 batches), production/ (values twice as large), table.json."""
    folder = tmp_path_factory.mktemp("profile")
    onnx.save(small_model(), folder / "model.onnx")
    for name, factor, first in (("calibration", 1, 0), ("production", 2, 100)):
        (folder / name).mkdir()
        for i in range(4):
            np.savez(folder / name / f"{i}.npz", x=factor * samples(first + i))
    words = ["calibrate", folder / "model.onnx", "--data", folder / "calibration"]
    with pytest.raises(SystemExit) as end:
        run_command([str(w) for w in [*words, "--out", folder / "table.json", "--quiet"]])
    assert not end.value.code
    return folder
