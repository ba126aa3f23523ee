"""`trtdiag profile`: what the activations of a model look like on some data."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from diag.cli import options
from diag.cli.console import Output, with_bar
from diag.drift.stats import Stats, TensorStats
from diag.errors import UsageError
from diag.pipeline.drift.profile import ProfileSettings, merge_profiles, profile_model
from diag.pipeline.drift.profile_slices import profile_model_slices

NAME = "profile"
HELP = (
    "Count the activations of a model on some data, in steps of the calibrated scales; write mergeable "
    "statistics that trtdiag drift compares."
)
EXAMPLE = (
    "Example: trtdiag profile model.onnx --data production/ --calibration table.json --out production.stats; "
    "trtdiag profile --merge monday.stats tuesday.stats --out week.stats"
)

_SHOWN = 5
"""Tensors shown; --json has all."""


def run(
    files: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="FP32 ONNX model; with --merge, two files or more.")
    ],
    out: Annotated[str, typer.Option("--out", metavar="STATS", help="File for the statistics.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="An .npz file or a folder of them, and the like (see compare --help); may hold NaN.",
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            metavar="TABLE",
            help="Table of trtdiag calibrate, or STATS whose tensors and scales are taken. Without it, the "
            "scales are the largest magnitudes of these data themselves.",
        ),
    ] = None,
    limit: options.Limit = None,
    channels: Annotated[
        bool, typer.Option("--channels", help="Also count every channel of every tensor.")
    ] = False,
    date: Annotated[
        str | None,
        typer.Option("--date", metavar="DATE", help="When the data were seen (YYYY-MM-DD), for timelines."),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="SLICES",
            help="Statistics for each slice, in folders under STATS: FILE.csv:COLUMN (one row a request, in "
            "the order of the data), or folders (each subfolder of the data is a slice).",
        ),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merge", help="Join statistics of parts of the data, exactly.")
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    if merged:
        if channels or any(found is not None for found in (data, calibration, limit, date, slices)):
            raise UsageError(
                "--merge joins statistics and reads no data",
                "Leave out --data, --calibration, --limit, --channels, --date and --slice.",
            )
        found = merge_profiles(files, out)
    else:
        settings = ProfileSettings(_only(files), _given(data), out, calibration, limit, channels, date)
        if slices is not None:
            return _run_slices(settings, slices, Output(as_json, quiet))
        found = with_bar(quiet or as_json, lambda progress: profile_model(settings, progress))
    Output(as_json, quiet).result(_as_json(found, out), lambda: _as_text(found, out))
    return 0


def _run_slices(settings: ProfileSettings, slices: str, output: Output) -> int:
    silent = output.quiet or output.as_json
    found = with_bar(silent, lambda progress: profile_model_slices(settings, slices, progress))
    counted = {name: stats.source.requests for name, stats in found.items()}
    output.result(
        {"stats": settings.out, "slices": counted},
        lambda: "\n".join(
            [f"{name}: {number} requests" for name, number in counted.items()] + [settings.out]
        ),
    )
    return 0


def _only(files: list[str]) -> str:
    if len(files) != 1:
        raise UsageError(f"{len(files)} models were given", "Give one; to join statistics use --merge.")
    return files[0]


def _given(data: str | None) -> str:
    if data is None:
        raise UsageError("there is nothing to profile", "Give --data DATA.")
    return data


def _as_json(stats: Stats, out: str) -> dict[str, Any]:
    source = stats.source
    return {
        "stats": out,
        "model_sha256": stats.model_sha256,
        "table_sha256": stats.table_sha256,
        "requests": source.requests,
        "batches": source.batches,
        "seen": source.seen,
        "dropped": source.dropped,
        "errors": source.errors,
        "random_seeds": sorted(source.seeds),
        "tensors": [_tensor(found) for found in stats],
    }


def _tensor(found: TensorStats) -> dict[str, Any]:
    tensor, elements = found.tensor, max(found.elements, 1)
    energy = found.moment("energy")
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "range": tensor.range,
        "scale_from": tensor.scale_from,
        "elements": found.elements,
        "minimum": found.minimum if found.elements else None,
        "maximum": found.maximum if found.elements else None,
        "mean": found.mean,
        "rms": found.rms,
        "zero_share": found.tally("zeros") / elements,
        "subnormal_share": found.tally("subnormals") / elements,
        "nan": found.tally("nan"),
        "positive_infinite": found.tally("positive_infinite"),
        "negative_infinite": found.tally("negative_infinite"),
        "bad_requests": found.tally("bad_requests"),
        "clipped_share": found.clipped / elements,
        "clipped_energy_ratio": found.moment("clipped_energy") / energy if energy else 0.0,
        "sqnr_db": found.sqnr_db if math.isfinite(found.sqnr_db) else None,
        "worst_requests": [label for label, _ in found.worst],
    }


def _as_text(stats: Stats, out: str) -> str:
    source = stats.source
    scales = "their own scales" if stats.table_sha256 is None else f"table {stats.table_sha256[:12]}..."
    lines = [f"{len(stats)} tensors, {source.requests} requests ({scales}): {out}"]
    if source.seeds:
        lines.append(f"RANDOM numbers (seed {', '.join(map(str, sorted(source.seeds)))}) prove little")
    lines += [
        f"warning: {found.tensor.name}: {found.nonfinite} elements in {found.tally('bad_requests')} requests "
        "are not finite; the rest was counted"
        for found in stats
        if found.nonfinite
    ]
    calibrated = [found for found in stats if found.tensor.scale_from != "unit" and found.moment("energy")]
    worst = sorted(calibrated, key=lambda found: found.sqnr_db)[:_SHOWN]
    title = "lowest SQNR in INT8"
    width = max(len(title), *(len(found.tensor.name) for found in worst)) if worst else len(title)
    lines += [f"  {title:{width}}{'dB':>8}{'clipped':>10}"]
    lines += [
        f"  {found.tensor.name:{width}}{found.sqnr_db:8.1f}{found.clipped / max(found.elements, 1):10.3%}"
        for found in worst
    ]
    return "\n".join(lines)
