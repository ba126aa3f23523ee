"""The main job on a real model: the ViT that a package carries, quantized to INT8, on real photos."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diag.files import output_folder
from diag.gate.threshold import parse_threshold
from diag.pipeline.calibrate.tables import calibrate_model
from diag.pipeline.compare.job import compare
from diag.pipeline.demo.assets import vit_model, write_photos
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.pipeline.settings import CompareSettings
from diag.progress import Progress
from diag.report.schema import Report

TARGET = "sqnr_db>=30"
"""What the demo asks of the quantized model: an error of 3 % of the signal."""

SEARCH_BUDGET_S = 60.0
"""The demo ends in three minutes or so on two cores; one batch is always ranked whole."""


@dataclass(frozen=True)
class Demo:
    """The model in INT8, and the smallest set of pins that was found for it."""

    quantized: Report
    pinned: PinResult
    folders: tuple[Path, ...]


def run_demo(out: str, progress: Progress) -> Demo:
    """Calibrate on one set of photos, compare on another, then find the pins that mend it, and prove them."""
    folder = output_folder(out)
    model = str(vit_model())
    for split in ("calib", "unseen"):
        write_photos(folder / "photos" / split, split)
    table = folder / "calibration.json"
    calibrate_model(model, str(folder / "photos" / "calib"), str(table), None, progress)
    settings = CompareSettings(
        model=model,
        data=str(folder / "photos" / "unseen"),
        out=str(folder / "int8"),
        format="int8",
        calibration=str(table),
        command="trtdiag demo",
        fail_under=(parse_threshold(TARGET),),
    )
    quantized = compare(settings, progress)
    search = SearchSettings(
        model=model,
        data=settings.data,
        out=str(folder / "pinned"),
        target=settings.fail_under,
        format="int8",
        calibration=str(table),
        budget_s=SEARCH_BUDGET_S,
        command="trtdiag demo",
    )
    pinned = pin_layers(search, progress)
    return Demo(quantized, pinned, (folder / "int8", folder / "pinned"))
