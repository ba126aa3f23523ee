"""`trtdiag calibrate --compensate`: better scales before pins."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from diag.calibration.table import CalibrationTable
from diag.cli.console import Output, with_bar
from diag.compensation.credits import credit_lines
from diag.compensation.run import STEPS, Compensated
from diag.compensation.trial import Metrics
from diag.errors import UsageError
from diag.pipeline.calibrate.compensate import CompensateSettings, compensate_model

Compensate = Annotated[
    bool,
    typer.Option(
        "--compensate",
        help="Also change what costs nothing in FP32 (smoothing, splits) and search scales and corrections; "
        "each step is kept only if held-out outputs improve. Writes a new model beside the table.",
    ),
]
ModelOut = Annotated[
    str | None,
    typer.Option("--model-out", metavar="MODEL", help="With --compensate: file for the new model."),
]
Holdout = Annotated[
    str | None,
    typer.Option(
        "--holdout",
        metavar="DATA",
        help="With --compensate: data to judge steps on; without it the last third of --data.",
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(
        "--steps", metavar="LIST", help=f"With --compensate: only these, of {','.join(STEPS)}. Default: all."
    ),
]


def refuse_mixed(compensate: bool, others: bool) -> None:
    """Raise UsageError for options that do not go together."""
    if not compensate:
        raise UsageError("--model-out, --holdout and --steps belong to --compensate", "Add --compensate.")
    if others:
        raise UsageError(
            "--compensate measures a model anew, in one process, on all batches",
            "Leave out --merge, --import, --export, --tensorrt-version, --all-tensors, --skip-bad "
            "and --jobs.",
        )


def settings_of(
    model: str,
    data: str,
    out: str,
    model_out: str | None,
    holdout: str | None,
    limit: int | None,
    method: str | None,
    plan: str | None,
    steps: str | None,
) -> CompensateSettings:
    """The options as settings. Raises UsageError for a step that does not exist, or without a name."""
    if model_out is None:
        raise UsageError("compensation makes a new model and needs a name for it", "Give --model-out FILE.")
    chosen = tuple(STEPS) if steps is None else tuple(word.strip() for word in steps.split(","))
    unknown = [word for word in chosen if word not in STEPS]
    if unknown:
        raise UsageError(f"there is no step {unknown[0]!r}", f"Choose among {', '.join(STEPS)}.")
    return CompensateSettings(model, data, out, model_out, holdout, limit, method, plan, steps=chosen)


def run(settings: CompensateSettings, output: Output) -> int:
    """Compensate, and say what each step brought."""
    silent = output.as_json or output.quiet
    table, found = with_bar(silent, lambda progress: compensate_model(settings, progress))
    output.result(_body(table, found, settings), lambda: _text(table, found, settings))
    return 0


def _body(table: CalibrationTable, found: Compensated, settings: CompensateSettings) -> dict[str, Any]:
    return {
        "table": settings.out,
        "model": settings.model_out,
        "method": table.method,
        "fp32_max_abs": found.difference.max_abs,
        "fp32_rel_l2": found.difference.rel_l2,
        "outputs_before": _plain(found.before.metrics),
        "outputs_after": _plain(found.after.metrics),
        "steps": [credit.model_dump() for credit in found.credits],
    }


def _plain(metrics: Metrics) -> dict[str, dict[str, float | None]]:
    return {
        name: {key: value if math.isfinite(value) else None for key, value in found.items()}
        for name, found in metrics.items()
    }


def _text(table: CalibrationTable, found: Compensated, settings: CompensateSettings) -> str:
    lines = [f"{settings.model_out} and {settings.out}, calibrated on {table.data}"]
    lines += credit_lines(found.credits)
    for name, before in found.before.metrics.items():
        after = found.after.metrics[name]
        shown = [key for key in ("sqnr_db", "cosine", "top1", "kl") if key in before]
        moved = ", ".join(f"{key} {before[key]:.4g} -> {after[key]:.4g}" for key in shown)
        lines.append(f"{name} on held-out batches: {moved}")
    lines.append(
        f"in FP32 the outputs differ by {found.difference.max_abs:.1e} at most "
        f"(relative L2 {found.difference.rel_l2:.1e})"
    )
    return "\n".join(lines)
