"""`trtdiag drift`: does production look like calibration?"""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, command_line, stdout_console, with_bar
from diag.pipeline.drift.job import drift
from diag.pipeline.drift.settings import DriftSettings
from diag.render.drift_text import drift_summary

NAME = "drift"
HELP = "Compare production's statistics with calibration: what is clipped and lost, since when, what to do."
EXAMPLE = "Example: trtdiag drift table.json production.stats --out out"


def run(
    calibration: Annotated[
        str,
        typer.Argument(metavar="TABLE_OR_STATS", help="A calibration table, or statistics of its data."),
    ],
    production: Annotated[
        list[str],
        typer.Argument(
            metavar="STATS...",
            help="Statistics of trtdiag profile: files, or folders of them (subfolders are slices; dates in "
            "names, or in the files, make a timeline).",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for report.json and report.html.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Names layers; needed for --data.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="Production data: measures what drift costs in INT8."),
    ] = None,
    reference_data: Annotated[
        str | None,
        typer.Option(
            "--reference-data", metavar="DATA", help="Calibration data, to measure the cost against."
        ),
    ] = None,
    limit: options.Limit = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on drift.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = DriftSettings(
        calibration=calibration,
        production=tuple(production),
        out=out,
        model=model,
        data=data,
        reference_data=reference_data,
        limit=limit,
        command=command_line(),
    )
    report = with_bar(quiet or as_json, lambda progress: drift(settings, progress))
    files = [f"{out}/report.html", f"{out}/report.json"]
    Output(as_json, quiet).result(
        report.model_dump(by_alias=True), lambda: drift_summary(report, stdout_console().width, files)
    )
    assert report.drift is not None
    return 1 if strict and report.drift.level == "fail" else 0
