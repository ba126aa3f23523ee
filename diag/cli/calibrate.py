"""`trtdiag calibrate`: measure the ranges that quantizers need."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Bar, Output
from diag.pipeline.tables import calibrate_model
from diag.progress import Silent

NAME = "calibrate"
HELP = "Measure the range of every tensor that INT8 would quantize (min-max), and write a table."
EXAMPLE = "Example: trtdiag calibrate model.onnx --data calibration/ --out table.json"


def run(
    model: options.Model,
    data: options.Data,
    out: Annotated[str, typer.Option("--out", metavar="TABLE", help="File for the table.")],
    limit: options.Limit = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    if quiet or as_json:
        table = calibrate_model(model, data, out, limit, Silent())
    else:
        with Bar() as bar:
            table = calibrate_model(model, data, out, limit, bar)
    result = {"table": out, "tensors": len(table.tensors), "batches": table.batches, "method": table.method}
    text = f"{len(table.tensors)} tensors calibrated on {table.batches} batches ({table.data}): {out}"
    Output(as_json, quiet).result(result, lambda: text)
    return 0
