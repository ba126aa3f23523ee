"""Makes calibration tables and typed models as files of their own: `trtdiag calibrate`, `trtdiag convert`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import TensorProto

from diag import __version__
from diag.calibration.awq import search_awq
from diag.calibration.best import choose_best
from diag.calibration.measurement import table_of
from diag.calibration.merge import merge_tables
from diag.calibration.run import RunOptions, measure
from diag.calibration.samples import CalibrationFeeds, open_calibration_feeds
from diag.calibration.state import Checkpoint
from diag.calibration.table import BEST, CHOICES, CalibrationTable, write_table
from diag.errors import ModelError, UsageError
from diag.files import output_file
from diag.model import shapes
from diag.model.graph import LINEAR_OPS, Model
from diag.model.load import load_model
from diag.model.save import save_model
from diag.pipeline.prepare import choose_plan, new_table, plan_on, read_scales
from diag.pipeline.structure import structure_notes
from diag.plan.schema import read_plan
from diag.progress import Progress
from diag.typed.apply import TypedModel, operands_of
from diag.typed.blocks import BlockLayer
from diag.typed.operands import Operand
from diag.typed.types import complete

ALL = "all"
"""Every method of one pass, and min-max as the one that is used."""


@dataclass(frozen=True, slots=True)
class CalibrateSettings:
    """Options of `trtdiag calibrate`, in its terms."""

    model: str
    data: str
    out: str
    limit: int | None = None
    method: str | None = None
    """One of `CHOICES` or `all`; None: the plan's, or else `all`."""
    plan: str | None = None
    jobs: int = 1
    resume: bool = True
    skip_bad: bool = False
    all_tensors: bool = False
    """Measure every float tensor, not only the operands of quantized layers."""


@dataclass(frozen=True, slots=True)
class _Job:
    settings: CalibrateSettings
    model: Model
    operands: tuple[Operand, ...]
    method: str
    feeds: CalibrationFeeds
    file: Path
    searched: tuple[BlockLayer, ...] = ()
    """Layers whose INT4 scales the plan wants searched."""

    @property
    def tensors(self) -> tuple[str, ...]:
        if self.settings.all_tensors:
            return _float_tensors(self.model)
        return tuple(dict.fromkeys(o.tensor for o in self.operands if o.weight is None))


def calibrate_model(
    model_path: str, data: str, out: str, limit: int | None, progress: Progress
) -> CalibrationTable:
    """Measure the operands of every Conv, ConvTranspose, MatMul and Gemm, and write the table to `out`.

    Raises ModelError when the model has no such layer.
    """
    return calibrate(CalibrateSettings(model_path, data, out, limit), progress)


def calibrate(settings: CalibrateSettings, progress: Progress) -> CalibrationTable:
    """Measure every tensor that the plan quantizes (without one: as INT8 would) and write the table.

    Every table holds the ranges of all methods of one pass; with method `best`, the layers' outputs are
    measured too. Raises ModelError when nothing is to be quantized, TableError when a tensor is not finite.
    """
    job = _job(settings)
    begun = Checkpoint(job.file.with_name(f".{job.file.name}.state"), _key(job)) if settings.resume else None
    options = RunOptions(settings.skip_bad, settings.jobs, begun, job.method == BEST)
    table = new_table(job.model, job.feeds, {})
    if job.tensors:
        found = measure(job.model, job.tensors, job.feeds, options, progress)
        progress.start("computing ranges", None)
        table = table_of(found, job.model.sha256, job.method)
    if job.searched:
        found_awq = search_awq(
            job.model, job.searched, job.feeds.again(settings.skip_bad), len(job.feeds), progress
        )
        table = table.model_copy(update={"awq": found_awq})
    if job.method == BEST:
        table = choose_best(job.model, job.operands, table, job.feeds, settings.skip_bad, progress)
    write_table(table, job.file)
    if begun is not None:
        begun.remove()
    return table


def merge(paths: Sequence[str], out: str, method: str | None) -> CalibrationTable:
    """Join tables of parts of the data and write the table of all of it. Raises TableError and UsageError."""
    table = merge_tables(paths, known_method(method))
    write_table(table, output_file(out))
    return table


def _job(settings: CalibrateSettings) -> _Job:
    method = known_method(settings.method)
    model, operands, planned, searched = _to_measure(settings)
    if settings.all_tensors and BEST in (method, planned):
        raise UsageError("the best method is measured on operands only", "Leave out --all-tensors.")
    feeds = open_calibration_feeds(settings.data, model.inputs, settings.limit, settings.skip_bad)
    if not operands and not searched:
        raise ModelError(
            "the model has no Conv, ConvTranspose, MatMul or Gemm to quantize"
            if settings.plan is None
            else f"plan {settings.plan!r} quantizes no activation",
            "Nothing to calibrate: INT4 takes its scales from the weights (`quantizer: {method: awq}` "
            "searches them on data), and MXFP8 finds them while the engine runs.",
        )
    file = output_file(settings.out, settings.model)
    return _Job(settings, model, operands, method or planned, feeds, file, searched)


def _float_tensors(model: Model) -> tuple[str, ...]:
    """FP32 tensors whose values depend on the model's inputs, in graph order."""
    types = complete(shapes.infer(model), model)
    names = (*model.inputs, *(name for layer in model.layers for name in layer.outputs))
    dependent = [name for name in names if name in model.value_dependent and name in types]
    return tuple(name for name in dependent if types[name].elem_type == TensorProto.FLOAT)


def known_method(method: str | None) -> str | None:
    """The method to store; None when none was asked for. Raises UsageError for a name that is none."""
    if method is not None and method not in (ALL, *CHOICES):
        raise UsageError(f"there is no method {method!r}", f"Choose {', '.join((ALL, *CHOICES))}.")
    return "minmax" if method == ALL else method


def _to_measure(
    settings: CalibrateSettings,
) -> tuple[Model, tuple[Operand, ...], str, tuple[BlockLayer, ...]]:
    """The model, the operands that get a quantizer, the plan's method, and the layers to search for INT4."""
    if settings.plan is None:
        model = load_model(settings.model)
        formats = {layer.id: "int8" for layer in model.layers if layer.op_type in LINEAR_OPS}
        return model, operands_of(model, formats, shapes.infer(model)), "minmax", ()
    planned = plan_on(settings.model, read_plan(settings.plan))
    searched = planned.blocks if planned.awq else ()
    return planned.model, planned.operands, planned.method or "minmax", searched


def _key(job: _Job) -> str:
    """Identity of a run: what it has counted may be taken up only by a run that counts the same."""
    facts = [__version__, job.model.sha256, job.tensors, job.feeds.sha256, job.settings.skip_bad]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def convert_model(
    model_path: str, plan_path: str | None, fmt: str | None, calibration: str | None, out: str
) -> TypedModel:
    """Apply a plan and write the typed model to `out`. Raises TableError when scales are missing."""
    file = output_file(out, model_path)
    planned = plan_on(model_path, choose_plan(plan_path, fmt))
    table = read_scales(planned, calibration)
    typed = planned.apply(table)
    typed = replace(typed, notes=(*typed.notes, *structure_notes(planned, typed)))
    save_model(typed.for_engines, typed.weights, file)
    return typed
