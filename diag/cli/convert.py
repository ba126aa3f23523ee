"""`trtdiag convert`: a plan applied, as a typed ONNX model."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output
from diag.pipeline.calibrate.tables import convert_model

NAME = "convert"
HELP = "Apply a precision plan: write the typed ONNX model that every engine runs."
EXAMPLE = "Example: trtdiag convert model.onnx --plan plan.yaml --calibration table.json --out typed.onnx"


def run(
    model: options.Model,
    out: Annotated[str, typer.Option("--out", metavar="TYPED", help="File for the typed model.")],
    plan: options.Plan = None,
    format_: options.Format = None,
    calibration: options.Calibration = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    typed = convert_model(model, plan, format_, calibration, out)
    counts = dict(Counter(typed.formats.values()))
    result = {"model": out, "layers": counts, "notes": list(typed.notes)}
    said = ", ".join(f"{n} {fmt}" for fmt, n in sorted(counts.items()))
    Output(as_json, quiet).result(result, lambda: "\n".join([f"{out}: layers {said}", *typed.notes]))
    return 0
