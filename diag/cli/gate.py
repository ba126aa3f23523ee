"""`trtdiag gate`: hold a report against thresholds."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output
from diag.gate.evaluate import evaluate
from diag.gate.threshold import parse_threshold
from diag.report.io import read_report
from diag.report.schema import GateResult

NAME = "gate"
HELP = "Check a report against thresholds; exit 1 when one is missed."
EXAMPLE = 'Example: trtdiag gate out/report.json --fail-under "cosine>=0.99"'


def run(
    report: Annotated[str, typer.Argument(metavar="REPORT", help="A report.json.")],
    fail_under: Annotated[
        list[str],
        typer.Option("--fail-under", metavar="CHECK", help='What must hold, e.g. "sqnr_db>=30". Repeatable.'),
    ],
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    result = evaluate(read_report(report), [parse_threshold(text) for text in fail_under])
    Output(as_json, quiet).result(result.model_dump(), lambda: _text(result))
    return 0 if result.passed else 1


def _text(result: GateResult) -> str:
    lines = [
        f"{'pass' if check.passed else 'FAIL'}  {check.name}  (measured {_number(check.value)})"
        for check in result.checks
    ]
    return "\n".join([*lines, "passed" if result.passed else "failed"])


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.6g}"
