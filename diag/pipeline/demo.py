"""The main job on a real model: the ViT that a package carries, quantized to INT8, on real photos."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from diag.files import output_folder
from diag.gate.threshold import parse_threshold
from diag.pipeline.compare import MEND_FILE, compare
from diag.pipeline.demo_assets import vit_model, write_photos
from diag.pipeline.settings import CompareSettings
from diag.pipeline.tables import calibrate_model
from diag.progress import Progress
from diag.report.schema import Report

TARGET = "sqnr_db>=30"
"""What the demo asks of the quantized model: an error of 3 % of the signal."""


@dataclass(frozen=True)
class Demo:
    """Reports of the model in INT8, and with the layers pinned that the first one points at."""

    quantized: Report
    mended: Report | None
    folders: tuple[Path, ...]


def run_demo(out: str, progress: Progress) -> Demo:
    """Calibrate on one set of photos, compare on another, then try the pins that the report suggests."""
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
    mend = folder / "int8" / MEND_FILE
    if not mend.is_file():
        return Demo(quantized, None, (folder / "int8",))
    again = dataclasses.replace(settings, format=None, plan=str(mend), out=str(folder / "mended"))
    return Demo(quantized, compare(again, progress), (folder / "int8", folder / "mended"))
