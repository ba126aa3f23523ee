"""`trtdiag pin --compensate`: better scales first, then pins, and the pins that became unnecessary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diag.compensation.credits import credit_sentences
from diag.compensation.run import Compensated
from diag.errors import UsageError
from diag.feeds import open_feeds
from diag.files import output_folder
from diag.model.load import load_model
from diag.pipeline.calibrate.compensate import CompensateSettings, compensate_model
from diag.pipeline.prepare import before_last_third
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.settings import BeforePins, SearchSettings
from diag.progress import Progress
from diag.search.target import Target

PLAIN_FOLDER = "without_compensation"
MODEL_FILE = "compensated.onnx"
TABLE_FILE = "compensated.json"


@dataclass(frozen=True)
class CompensatedPins:
    """Pins of the compensated model, and of the model as it came."""

    result: PinResult
    plain: PinResult
    compensated: Compensated
    model: str
    table: str

    @property
    def unnecessary(self) -> list[str]:
        """Pins that the model needs without compensation only; none where no pins were enough."""
        if not self.plain.met:
            return []
        return [pin for pin in self.plain.search.pins if pin not in self.result.search.pins]


def pin_compensated(settings: SearchSettings, progress: Progress) -> CompensatedPins:
    """Search pins of the model as it came, compensate it by the target, and search again.

    Compensation sees the batches that pins are chosen on, never those that prove them. Raises UsageError for
    options that belong to one of the two models only, and NotEnoughEvidenceError below three batches.
    """
    if settings.metric is not None or settings.ranking is not None:
        raise UsageError(
            "a metric of your own and a ranking cannot steer compensation",
            "Leave out --metric and --ranking, or compensate first with trtdiag calibrate --compensate.",
        )
    out = output_folder(settings.out)
    plain = pin_layers(replace(settings, out=str(out / PLAIN_FOLDER), confirm=None), progress)
    model, table = str(out / MODEL_FILE), str(out / TABLE_FILE)
    compensated = _compensated(settings, model, table, progress)
    before = BeforePins(
        tuple(credit_sentences(compensated.credits)), tuple(plain.search.pins) if plain.met else None
    )
    better = replace(settings, model=model, calibration=table, before=before)
    return CompensatedPins(pin_layers(better, progress), plain, compensated, model, table)


def _compensated(settings: SearchSettings, model: str, table: str, progress: Progress) -> Compensated:
    asked = CompensateSettings(
        model=settings.model,
        data=settings.data,
        out=table,
        model_out=model,
        limit=_chosen(settings),
        plan=settings.plan,
        format=settings.format or "int8",
        damage=Target(settings.target).damage,
    )
    return compensate_model(asked, progress)[1]


def _chosen(settings: SearchSettings) -> int | None:
    """How many of the first batches pins are chosen on."""
    if settings.holdout is not None:
        return settings.limit
    total = len(open_feeds(settings.data, load_model(settings.model).inputs, settings.limit))
    return max(1, before_last_third(total))
