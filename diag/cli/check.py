"""`trtdiag check`: hazards of a model, with or without data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, command_line, exit_code, with_bar
from diag.pipeline.check.job import MEND_FILE, CheckSettings, check
from diag.pipeline.compare.findings import mending_pins
from diag.report.schema import Report

NAME = "check"
HELP = (
    "Find hazards before anything is built: quantizers that TensorRT cannot use, constants that a format "
    "cannot hold, and with data, values beyond its range."
)
EXAMPLE = "Example: trtdiag check model.onnx --format fp16 --data batches/ --out checked"

Data = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="Inputs for measuring ranges (see compare --help)."),
]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for report.json and report.html.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit 1 on any error or warning.")]


def run(
    model: options.Model,
    out: Out,
    plan: options.Plan = None,
    format_: options.Format = None,
    data: Data = None,
    limit: options.Limit = None,
    strict: Strict = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = CheckSettings(model, out, plan, format_, data, limit, strict, command_line())
    report = with_bar(quiet or as_json, lambda progress: check(settings, progress))
    names = ["report.html", "report.json", *([MEND_FILE] if mending_pins(report.findings) else [])]
    files = [f"{out}/{name}" for name in names]
    Output(as_json, quiet).result(report.model_dump(by_alias=True), lambda: "\n".join(_lines(report, files)))
    return exit_code(report)


def _lines(report: Report, files: list[str]) -> Iterator[str]:
    yield report.verdict
    for finding in report.findings:
        yield f"{finding.severity}: {finding.title}"
        if finding.mend.text:
            yield f"  {finding.mend.text}"
    if report.gate is not None:
        yield "strict: passed" if report.gate.passed else "strict: failed"
    yield "Files: " + "  ".join(files)
