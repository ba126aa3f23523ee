"""Makes calibration tables and typed models as files of their own: `trtdiag calibrate`, `trtdiag convert`."""

from __future__ import annotations

from diag.calibration.minmax import measure_ranges
from diag.calibration.table import CalibrationTable, write_table
from diag.errors import ModelError
from diag.feeds import Feeds, open_feeds
from diag.files import output_file
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import load_model
from diag.model.save import save_model
from diag.pipeline.prepare import choose_plan, new_table, plan_on, read_scales
from diag.progress import Progress
from diag.typed.apply import TypedModel, operands_of
from diag.typed.operands import LINEAR_OPS


def calibrate_model(
    model_path: str, data: str, out: str, limit: int | None, progress: Progress
) -> CalibrationTable:
    """Measure the operands of every Conv, ConvTranspose, MatMul and Gemm, and write the table to `out`.

    Raises ModelError when the model has no such layer.
    """
    model = load_model(model_path)
    feeds = open_feeds(data, model.inputs, limit)
    tensors = _operands(model)
    if not tensors:
        raise ModelError(
            "the model has no Conv, ConvTranspose, MatMul or Gemm to quantize", "Nothing to calibrate."
        )
    file = output_file(out)
    table = _measure(model, feeds, tensors, progress)
    write_table(table, file)
    return table


def _operands(model: Model) -> tuple[str, ...]:
    formats = {layer.id: "int8" for layer in model.layers if layer.op_type in LINEAR_OPS}
    operands = operands_of(model, formats, shapes.infer(model))
    return tuple(dict.fromkeys(o.tensor for o in operands if o.weight is None))


def _measure(model: Model, feeds: Feeds, tensors: tuple[str, ...], progress: Progress) -> CalibrationTable:
    progress.start("calibrating (min-max)", len(feeds))
    return new_table(model, feeds, measure_ranges(model, tensors, feeds, progress))


def convert_model(
    model_path: str, plan_path: str | None, fmt: str | None, calibration: str | None, out: str
) -> TypedModel:
    """Apply a plan and write the typed model to `out`. Raises TableError when scales are missing."""
    planned = plan_on(model_path, choose_plan(plan_path, fmt))
    table = read_scales(planned, calibration)
    typed = planned.apply(table)
    save_model(typed.proto, typed.weights, output_file(out))
    return typed
