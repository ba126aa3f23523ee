"""Checks everything a comparison needs, and estimates what it will take, before anything long begins."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from diag.engines.onnxruntime import Session
from diag.feeds import open_feeds
from diag.files import output_folder
from diag.pipeline.compare.job import refuse_engine, refuse_settings
from diag.pipeline.prepare import choose_plan, plan_on
from diag.pipeline.settings import CompareSettings
from diag.progress import Progress

_RUNS_PER_BATCH = 4.0
"""A batch costs about this many plain FP32 runs: reference, emulation, local emulation, metrics."""
_COPIES_OF_WEIGHTS = 3.0
_START_MB = 250.0


@dataclass(frozen=True)
class Estimate:
    """What was found, and what the run will take (a guide: within a factor of two)."""

    layers: dict[str, int]
    batches: int
    data: str
    calibration: str
    seconds: float
    memory_mb: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        layers = ", ".join(f"{n} in {fmt}" for fmt, n in sorted(self.layers.items()))
        return (
            f"model, plan and data are usable\nlayers: {layers}\ndata: {self.data}, {self.batches} batches\n"
            f"scales: {self.calibration}\nestimate: {self.seconds:.0f} s, {self.memory_mb:.0f} MB"
        )


def dry_run(settings: CompareSettings, progress: Progress) -> Estimate:
    """Load, resolve, read all data and every scale, run one plain FP32 batch.

    Raises what the comparison would raise.
    """
    refuse_engine(settings.engine.engine)
    output_folder(settings.out)
    planned = plan_on(settings.model, choose_plan(settings.plan, settings.format))
    refuse_settings(planned, settings)
    feeds = open_feeds(settings.data, planned.model.inputs, settings.limit)
    feeds.check_all()
    began = time.monotonic()
    session = Session(planned.model.proto, planned.model.weights)
    loaded = time.monotonic()
    session.run(feeds.first())
    load_s, run_s = loaded - began, time.monotonic() - loaded
    weights_mb = sum(array.nbytes for array in planned.model.weights.values()) / 1e6
    calibrates = bool(planned.activations) and settings.calibration is None
    runs = len(feeds) * (_RUNS_PER_BATCH + calibrates)
    return Estimate(
        layers=dict(Counter(planned.resolved.formats.values())),
        batches=len(feeds),
        data=feeds.label,
        calibration=settings.calibration or _scales(planned.awq, calibrates),
        seconds=run_s * runs + 6 * load_s,
        memory_mb=_START_MB + _COPIES_OF_WEIGHTS * weights_mb + 2 * settings.slice_mb,
    )


def _scales(awq: bool, calibrates: bool) -> str:
    """Where scales come from without a table."""
    found = ["min-max on the data given"] * calibrates + ["INT4 searched on the data given"] * awq
    return ", ".join(found) or "none needed"
