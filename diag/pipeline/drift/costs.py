"""What drift costs: the quantized model's error on production beside its error on calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diag.calibration.table import CalibrationTable, TensorRange, write_table
from diag.drift.compare import Compared
from diag.drift.judge import LEVELS, Level
from diag.drift.spread import LAST_CODE
from diag.model.graph import Model
from diag.pipeline.compare.job import compare
from diag.pipeline.drift.settings import DriftSettings
from diag.pipeline.drift.sources import Sources
from diag.pipeline.settings import CompareSettings
from diag.progress import Progress
from diag.report.drift import DriftCost
from diag.report.schema import LayerInfo, Report


@dataclass(frozen=True)
class Costs:
    """Error of the quantized layers, and whether it agrees with the drift."""

    layers: tuple[DriftCost, ...] = ()
    agree: bool | None = None
    sentence: str = ""


def measure_costs(
    settings: DriftSettings,
    sources: Sources,
    compared: Compared,
    model: Model,
    costly_db: float,
    progress: Progress,
) -> Costs:
    """Compare the INT8 model with its reference on production, and on reference data where they are given.

    Both reports go into folders of their own under `settings.out`. Raises what a comparison raises.
    """
    assert settings.model is not None and settings.data is not None
    table = _table(settings, sources)
    production = _compared(settings, settings.data, "compare-production", table, progress)
    reference = None
    if settings.reference_data is not None:
        reference = _compared(settings, settings.reference_data, "compare-calibration", table, progress)
    layers = _layers(production, reference, compared, model)
    if reference is None:
        return Costs(
            layers, None, f"Output {_output(production)} on production; no reference data were given."
        )
    lost_db = _worst_loss(production, reference)
    lossy = {cost.layer for cost in layers if _lost(cost) >= costly_db}
    drifting = {cost.layer for cost in layers if cost.level != "ok"}
    sentence = f"Output {_output(production)} on production, {_output(reference, False)} on reference data"
    return _judged(layers, lossy, drifting, lost_db >= costly_db, sentence)


def _judged(
    layers: tuple[DriftCost, ...], lossy: set[str], drifting: set[str], costly: bool, sentence: str
) -> Costs:
    """Whether the damage lies where the drift is, in words."""
    moved = f"of {len(layers)} quantized layers {len(drifting)} read tensors that moved"
    if drifting and costly:
        agree = bool(lossy & drifting)
        word = "and they are among those that lose" if agree else "but those that lose most are others"
        return Costs(layers, agree, f"{sentence}: {moved}, {word}.")
    if drifting:
        return Costs(layers, False, f"{sentence}: {moved}, yet the output does not suffer.")
    if costly:
        said = "the output suffers although no range drifts, so recalibrating alone will not mend it"
        return Costs(layers, False, f"{sentence}: {said}.")
    return Costs(layers, True, f"{sentence}: no range drifts, and the output does not suffer.")


def _table(settings: DriftSettings, sources: Sources) -> str:
    """The table's path; where statistics were given, their ranges as a table."""
    if sources.calibration.table is not None:
        return settings.calibration
    stats = sources.calibration.stats
    assert stats is not None
    ranges = {
        name: TensorRange(
            absmax=sources.steps[name] * LAST_CODE,
            minimum=stats[name].minimum,
            maximum=stats[name].maximum,
            elements=stats[name].elements,
        )
        for name in sources.steps
        if name in stats.index and stats[name].elements
    }
    table = CalibrationTable(
        schema="trtdiag.calibration/1",
        model_sha256=stats.model_sha256,
        data=sources.calibration.words,
        data_sha256=f"{stats.source.identity:064x}",
        method="minmax",
        batches=stats.source.batches,
        samples=stats.source.requests,
        tensors=ranges,
    )
    path = Path(settings.out) / "ranges.json"
    write_table(table, path)
    return str(path)


def _compared(settings: DriftSettings, data: str, folder: str, table: str, progress: Progress) -> Report:
    assert settings.model is not None
    asked = CompareSettings(
        model=settings.model,
        data=data,
        out=f"{settings.out.rstrip('/')}/{folder}",
        format="int8",
        calibration=table,
        limit=settings.limit,
        slice_mb=32,
        command=settings.command,
    )
    return compare(asked, progress)


def _layers(
    production: Report, reference: Report | None, compared: Compared, model: Model
) -> tuple[DriftCost, ...]:
    """Every quantized layer, those that lose the most first."""
    levels = {tensor.name: tensor.level for tensor in compared.judged}
    reads = {layer.id: [name for name in layer.reads if name in levels] for layer in model.layers}
    before = {layer.id: layer for layer in reference.layers} if reference else {}
    found = [
        DriftCost(
            layer=layer.name,
            tensor=_most(reads[layer.id], levels),
            level=levels[_most(reads[layer.id], levels)],
            calibration_sqnr_db=_sqnr(before.get(layer.id)),
            production_sqnr_db=sqnr,
        )
        for layer in production.layers
        if layer.format == "int8" and reads.get(layer.id) and (sqnr := _sqnr(layer)) is not None
    ]
    return tuple(sorted(found, key=_lost, reverse=True))


def _most(names: Sequence[str], levels: Mapping[str, Level]) -> str:
    """Of the tensors that a layer reads, the one that drifts most."""
    return max(names, key=lambda name: LEVELS.index(levels[name]))


def _sqnr(layer: LayerInfo | None) -> float | None:
    return None if layer is None or layer.status != "compared" else layer.accumulated.get("sqnr_db")


def _lost(cost: DriftCost) -> float:
    before = cost.calibration_sqnr_db
    return -cost.production_sqnr_db if before is None else before - cost.production_sqnr_db


def _worst_loss(production: Report, reference: Report) -> float:
    """The most that an output loses, in dB."""
    before = {output.name: output.metrics["sqnr_db"] for output in reference.outputs}
    return max(
        (before[o.name] - o.metrics["sqnr_db"] for o in production.outputs if o.name in before), default=0.0
    )


def _output(report: Report, named: bool = True) -> str:
    if not report.outputs:
        return "(none could be compared)"
    worst = min(report.outputs, key=lambda output: output.metrics["sqnr_db"])
    value = f"{worst.metrics['sqnr_db']:.1f} dB (cosine {worst.metrics['cosine']:.4f})"
    return f"{worst.name} has {value}" if named else value
