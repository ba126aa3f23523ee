"""`trtdiag demo`: the main job on a model that a package carries."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType

from diag.cli import options
from diag.cli.console import Output, stdout_console, with_bar
from diag.pipeline.demo.job import Demo, run_demo
from diag.render.text import summary

NAME = "demo"
HELP = "Find what INT8 does to a real vision transformer on real photos, and which few layers mend it."
EXAMPLE = "Example: trtdiag demo --out demo"


def run(
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for photos, table and reports.")],
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    demo = with_bar(quiet or as_json, lambda progress: run_demo(out, progress))
    reports = {"int8": demo.quantized, "pinned": demo.pinned.report}
    body = {name: report.model_dump(by_alias=True) for name, report in reports.items() if report}
    Output(as_json, quiet).result(body, lambda: _text(demo))
    return 0


def _text(demo: Demo) -> RenderableType:
    pages = [f"{folder}/report.html" for folder in demo.folders]
    parts: list[RenderableType] = [summary(demo.quantized, stdout_console().width, pages[:1])]
    found = demo.pinned
    if found.report is None:
        return Group(*parts, "", found.verdict)
    parts += ["", f"Which layers must stay out of INT8 ({pages[1]}):", found.verdict, found.proof]
    parts += [f"  {pin}" for pin in found.search.pins]
    return Group(*parts)
