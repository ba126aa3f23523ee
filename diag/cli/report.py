"""`trtdiag report`: the HTML page of a report."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output
from diag.files import output_file, write_text
from diag.render.html import render_html
from diag.report.io import read_report

NAME = "report"
HELP = "Render a report.json as one offline HTML page."
EXAMPLE = "Example: trtdiag report out/report.json --out report.html"


def run(
    report: Annotated[str, typer.Argument(metavar="REPORT", help="A report.json.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File for the page.")],
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    page = render_html(read_report(report))
    write_text(page, output_file(out, report))
    Output(as_json, quiet).result({"page": out, "bytes": len(page.encode())}, lambda: f"written: {out}")
    return 0
