"""`trtdiag calibrate`: measure the ranges that quantizers need."""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import typer

from diag.calibration.remarks import Remark, costs_of, measured_methods, remarks
from diag.calibration.table import PERCENTILE, Awq, CalibrationTable
from diag.cli import caches, compensation, options
from diag.cli.console import Output, with_bar
from diag.errors import UsageError
from diag.pipeline.calibrate.cache_import import ImportSettings
from diag.pipeline.calibrate.tables import CalibrateSettings, calibrate, merge

NAME = "calibrate"
HELP = "Measure the ranges of every tensor that INT8 would quantize, by every method at once; write a table."
EXAMPLE = (
    "Example: trtdiag calibrate model.onnx --data calibration/ --out table.json; "
    "trtdiag calibrate --merge a.json b.json --out table.json; "
    "trtdiag calibrate model.onnx --import model.cache --data calibration/ --out table.json"
)

_SHOWN = 3
"""Tensors named for each remark; --json has all of them."""


Files = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help="FP32 ONNX model; tables with --merge, one table with --export."),
]
Out = Annotated[str, typer.Option("--out", metavar="TABLE", help="File for the table, or for the cache.")]
CalibrationData = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Calibration data: an .npz file or a folder of them, and the like (see compare --help).",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="Whose ranges are used: minmax, entropy, percentile (99.99), mse, best (measured on the "
        "layers' outputs). All but best are in the table anyway. Default: the plan's, or all (minmax).",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", metavar="N", help="Processes that run the model.")]
Resume = Annotated[bool, typer.Option(help="Go on where an interrupted run of the same command stopped.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out batches with NaN or infinity instead of refusing.")
]
AllTensors = Annotated[
    bool,
    typer.Option("--all-tensors", help="Every float tensor, as a TensorRT cache wants, not only operands."),
]
Merge = Annotated[bool, typer.Option("--merge", help="Join tables of parts of the data, exactly.")]
Import = Annotated[
    str | None,
    typer.Option(
        "--import",
        metavar="CACHE",
        help="Make the table from a TensorRT calibration cache; with --data, hold its scales against them.",
    ),
]
Export = Annotated[
    bool, typer.Option("--export", help="Write a table as a calibration cache for TensorRT 10 and older.")
]
Version = Annotated[
    str | None,
    typer.Option("--tensorrt-version", metavar="V", help="With --export: who shall read it, e.g. 10.6.0."),
]


def run(
    files: Files,
    out: Out,
    data: CalibrationData = None,
    method: Method = None,
    plan: options.Plan = None,
    limit: options.Limit = None,
    jobs: Jobs = 1,
    resume: Resume = True,
    skip_bad: SkipBad = False,
    all_tensors: AllTensors = False,
    merged: Merge = False,
    import_: Import = None,
    export: Export = False,
    tensorrt_version: Version = None,
    compensate: compensation.Compensate = False,
    model_out: compensation.ModelOut = None,
    holdout: compensation.Holdout = None,
    steps: compensation.Steps = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    output = Output(as_json, quiet)
    passes = jobs != 1 or skip_bad or all_tensors
    if compensate or model_out is not None or holdout is not None or steps is not None:
        others = merged or export or import_ is not None or tensorrt_version is not None or passes
        compensation.refuse_mixed(compensate, others)
        asked_model = _only(files)
        return compensation.run(
            compensation.settings_of(
                asked_model, _given(data), out, model_out, holdout, limit, method, plan, steps
            ),
            output,
        )
    _refuse_mixed(merged, export, import_ is not None)
    if merged or export:
        measures = data is not None or plan is not None or limit is not None or passes
        _refuse_data("--merge joins" if merged else "--export writes", measures)
    if tensorrt_version is not None and not export:
        raise UsageError("--tensorrt-version says who reads a cache", "Give it with --export.")
    if export:
        return caches.export(_only(files), out, tensorrt_version, method, output)
    if import_ is not None:
        caches.refuse_idle(data, limit is not None or jobs != 1 or skip_bad, all_tensors)
        asked = ImportSettings(_only(files), import_, out, data, plan, limit, jobs, skip_bad)
        return caches.import_(asked, method, output)
    if merged:
        table = merge(files, out, method)
    else:
        settings = CalibrateSettings(
            _only(files), _given(data), out, limit, method, plan, jobs, resume, skip_bad, all_tensors
        )
        table = with_bar(quiet or as_json, lambda progress: calibrate(settings, progress))
    found = remarks(table)
    output.result(_as_json(table, found, out), lambda: _as_text(table, found, out))
    return 0


def _refuse_mixed(*modes: bool) -> None:
    if sum(modes) > 1:
        raise UsageError("--merge, --import and --export are three different jobs", "Give one of them.")


def _refuse_data(job: str, measures: bool) -> None:
    if measures:
        raise UsageError(
            f"{job} tables and reads no data",
            "Leave out --data, --plan, --limit, --jobs, --skip-bad and --all-tensors.",
        )


def _only(files: list[str]) -> str:
    if len(files) != 1:
        raise UsageError(f"{len(files)} models were given", "Give one; to join tables use --merge.")
    return files[0]


def _given(data: str | None) -> str:
    if data is None:
        raise UsageError("there is nothing to calibrate on", "Give --data DATA.")
    return data


def _as_json(table: CalibrationTable, found: list[Remark], out: str) -> dict[str, Any]:
    best = [tensor.best for tensor in table.tensors.values() if tensor.best]
    return {
        "table": out,
        "tensors": len(table.tensors),
        "batches": table.batches,
        "samples": table.samples,
        "skipped_batches": table.skipped_batches,
        "method": table.method,
        "best": {name: best.count(name) for name in dict.fromkeys(best)},
        "awq": _awq_layers(table.awq),
        "remarks": [
            {"kind": r.kind, "severity": r.severity, "method": r.method, "tensors": dict(r.tensors)}
            for r in found
        ],
    }


def _awq_layers(awq: Awq | None) -> dict[str, dict[str, float]]:
    """Layer to its output's SQNR on rows held out, before and after the search, and its scale's alpha."""
    if awq is None:
        return {}
    return {
        name: {
            "sqnr_db_before": layer.sqnr_db_before,
            "sqnr_db_after": layer.sqnr_db_after,
            "alpha": awq.alphas.get(layer.tensor, 0.0),
        }
        for name, layer in awq.layers.items()
    }


def _awq_text(awq: Awq, out: str) -> str:
    """What the search for INT4 brought, in one sentence."""
    layers = list(awq.layers.values())
    better = sum(bool(layer.ratios) for layer in layers)
    before, after = (
        statistics.median(values)
        for values in ([x.sqnr_db_before for x in layers], [x.sqnr_db_after for x in layers])
    )
    scaled = f"; {len(awq.factors)} inputs are scaled by a Mul" if awq.factors else ""
    return (
        f"INT4: {better} of {len(layers)} layers gain by the search, the median output on rows held out goes "
        f"from {before:.1f} to {after:.1f} dB{scaled}: {out}"
    )


def _as_text(table: CalibrationTable, found: list[Remark], out: str) -> str:
    if table.awq is not None and table.awq.layers and not table.tensors:
        return _awq_text(table.awq, out)
    lines = [f"{len(table.tensors)} tensors calibrated on {table.data}: {out} (uses {table.method})"]
    if table.skipped_batches:
        lines.append(f"{table.skipped_batches} batches were left out: not finite")
    best = [tensor.best for tensor in table.tensors.values() if tensor.best]
    if best:
        counted = (f"{name} {best.count(name)}" for name in dict.fromkeys(best))
        lines.append(f"best methods: {', '.join(counted)} tensors")
    used = PERCENTILE if table.method == "percentile" else table.method
    lines += [_line(remark) for remark in found if remark.method in ("", used)]
    lines += [_awq_text(table.awq, out)] if table.awq is not None and table.awq.layers else []
    return "\n".join([*lines, *_methods(table, found)])


def _methods(table: CalibrationTable, found: list[Remark]) -> list[str]:
    """One row for each method: how many tensors it treats badly."""
    rows = [f"  {'method':18}{'clip over 1 %':>14}{'over 5 %':>10}{'unstable':>10}{'worst output':>14}"]
    for method in measured_methods(table):
        of_method = [remark for remark in found if remark.method == method]
        error = _tensors(of_method, "clipped", "error")
        clipped = error + _tensors(of_method, "clipped", "warning")
        unstable = _tensors(of_method, "unstable", "warning")
        measured = [cost.output_sqnr_db for cost in costs_of(table, method).values()]
        worst = min((value for value in measured if value is not None), default=None)
        shown = "-" if worst is None else f"{worst:.1f} dB"
        rows.append(f"  {method:18}{clipped:14}{error:10}{unstable:10}{shown:>14}")
    return rows


def _tensors(found: list[Remark], kind: str, severity: str) -> int:
    return sum(len(r.tensors) for r in found if (r.kind, r.severity) == (kind, severity))


def _line(remark: Remark) -> str:
    method = f"{remark.method}: " if remark.method else ""
    named = ", ".join(
        name if figure is None else f"{name} ({_figure(remark, figure)})"
        for name, figure in list(remark.tensors.items())[:_SHOWN]
    )
    more = f" and {len(remark.tensors) - _SHOWN} more" if len(remark.tensors) > _SHOWN else ""
    return f"{remark.severity}: {method}{len(remark.tensors)} tensors {remark.text}: {named}{more}"


def _figure(remark: Remark, figure: float) -> str:
    return f"{figure:.0f} elements" if remark.kind == "nonfinite" else f"{100 * figure:.1f} %"
