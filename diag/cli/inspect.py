"""`trtdiag inspect`: what an engine, an inspector's JSON, a build log or a calibration cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, command_line, exit_code, with_bar
from diag.pipeline.inspect.job import REPORT_FILES, Inspection, InspectSettings, inspect
from diag.pipeline.inspect.qdq import QDQ_FILES
from diag.pipeline.inspect.report import Overview

NAME = "inspect"
HELP = (
    "Show what an engine really holds: kernels, types, what of a plan was built. Reads calibration caches, "
    "and Q/DQ models of other tools: with --out as plan, table and FP32 model."
)
EXAMPLE = "Example: trtdiag inspect model.engine --model model.onnx --plan plan.yaml --strict --out inspected"

_SHOWN_LAYERS = 3


def run(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Engine, inspector JSON, verbose log, calibration cache, or Q/DQ ONNX model."
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The FP32 ONNX model it was made from.")
    ] = None,
    plan: options.Plan = None,
    format_: options.Format = None,
    times: Annotated[
        str | None,
        typer.Option("--times", metavar="FILE", help="Kernel times, as trtexec --exportProfile writes them."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for report.json and report.html; of a Q/DQ model also plan, table and FP32 model.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 when a request was not honoured, or on any warning.")
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = InspectSettings(
        file=file,
        model=model,
        plan=plan,
        format=format_,
        times=times,
        out=out,
        strict=strict,
        command=command_line(),
    )
    inspection = with_bar(quiet or as_json, lambda progress: inspect(settings, progress))
    report = inspection.report
    Output(as_json, quiet).result(
        report.model_dump(by_alias=True), lambda: "\n".join(_lines(inspection, out))
    )
    return exit_code(report)


def _lines(inspection: Inspection, out: str | None) -> Iterator[str]:
    report = inspection.report
    yield report.verdict
    rows = [] if inspection.overview is None else list(_rows(inspection.overview, inspection))
    if inspection.qdq is not None:
        rows = list(inspection.qdq.rows)
    if rows:
        width = max(len(name) for name, _ in rows)
        yield from (f"{name:<{width}}  {value}" for name, value in rows)
    for finding in report.findings:
        yield f"{finding.severity}: {finding.title}"
        if finding.severity != "note" and finding.mend.text:
            yield f"  {finding.mend.text}"
    yield from (f"note: {note}" for note in inspection.notes)
    if report.gate is not None:
        yield "strict: passed" if report.gate.passed else "strict: failed"
    if out is not None:
        files = (*REPORT_FILES, *(QDQ_FILES if inspection.qdq is not None else ()))
        yield "Files: " + "  ".join(f"{out.rstrip('/')}/{name}" for name in files)


def _rows(counted: Overview, inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "kernels", f"{counted.kernels}, of which {sum(counted.multiplying.values())} multiply"
    yield "multiply in", _counts(counted.multiplying)
    yield "tensors written", _counts(counted.written)
    total = counted.named + counted.folded
    share = f" ({counted.named / total:.0%}), {counted.folded} folded away" if counted.folded else ""
    yield "nodes named", f"{counted.named} of {total}{share}" if share else str(counted.named)
    for asked, found in sorted(counted.built.items()):
        yield f"asked in {asked}", f"{sum(found.values())} layers, built: {_counts(found)}"
    sums = "not told by the tactics" if not counted.accumulators_known else "0 kernels"
    yield "add up in FP16", _found(inspection, "fp16-accumulation", "kernels") or sums
    yield "norms in FP16", _found(inspection, "norm-in-fp16", "layers") or "0 layers"
    price = ""
    if counted.time_ms is not None:
        price = f", {counted.reformat_time_ms or 0.0:.4g} ms of {counted.time_ms:.4g} ms"
    yield "reformats", f"{counted.reformats} kernels{price}"


def _found(inspection: Inspection, fact: str, unit: str) -> str:
    """How many kernels or layers a finding is about; '' when there is none."""
    for finding in inspection.report.findings:
        if finding.evidence.get("fact") == fact:
            return f"{finding.evidence[unit]:.0f} {unit}"
    return ""


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(found.items())) or "none"
