"""`trtdiag pin`: the smallest set of layers to keep in higher precision."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, command_line, with_bar
from diag.cli.search_options import (
    Budget,
    Confirm,
    Holdout,
    Jobs,
    MaxPins,
    MaxPrice,
    Metric,
    Prices,
    Ranking,
    Ray,
    Target,
    ceiling_of,
    engine_of,
    seconds_of,
    targets_of,
    workers_of,
)
from diag.compensation.credits import credit_lines
from diag.pipeline.search.compensated import CompensatedPins, pin_compensated
from diag.pipeline.search.explain import pins_of
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.on_builds import OnBuilds
from diag.pipeline.search.outcome import Metrics
from diag.pipeline.search.settings import SearchSettings
from diag.render.cells import count
from diag.report.schema import Finding
from diag.search.target import Target as SearchTarget

Compensate = Annotated[
    bool,
    typer.Option(
        "--compensate",
        help="Try better scales first (see calibrate --compensate); say which pins they make unnecessary.",
    ),
]

_SHOWN = 12
REPORT_FILE = "report.json"

NAME = "pin"
HELP = "Find the smallest set of layers to keep in higher precision so that a target holds, and prove it."
EXAMPLE = 'Example: trtdiag pin model.onnx --format int8 --data batches/ --target "cosine>=0.99" --out pinned'


def run(
    model: options.Model,
    data: options.Data,
    target: Target,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the plan, model and report.")],
    plan: options.Plan = None,
    format_: options.Format = None,
    calibration: options.Calibration = None,
    holdout: Holdout = None,
    limit: options.Limit = None,
    budget: Budget = None,
    metric: Metric = None,
    ranking: Ranking = None,
    max_pins: MaxPins = None,
    max_price: MaxPrice = None,
    prices: Prices = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    confirm: Confirm = None,
    compensate: Compensate = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = SearchSettings(
        model=model,
        data=data,
        out=out,
        target=targets_of(target or (), metric),
        plan=plan,
        format=format_,
        calibration=calibration,
        holdout=holdout,
        limit=limit,
        budget_s=seconds_of(budget),
        metric=metric,
        ranking=ranking,
        ceiling=ceiling_of(max_pins, max_price),
        prices=tuple(prices or ()),
        jobs=workers_of(jobs),
        ray=ray,
        confirm=engine_of(confirm),
        command=command_line(),
    )
    if compensate:
        both = with_bar(quiet or as_json, lambda progress: pin_compensated(settings, progress))
        result, after = both.result, _compensation_text(both)
        body = {**_body(result), **_compensation_body(both)}
    else:
        result, after = with_bar(quiet or as_json, lambda progress: pin_layers(settings, progress)), ""
        body = _body(result)
    Output(as_json, quiet).result(body, lambda: _text(result, SearchTarget(settings.target), out) + after)
    return 0 if result.met else 1


def _compensation_body(both: CompensatedPins) -> dict[str, object]:
    return {
        "model": both.model,
        "calibration": both.table,
        "steps": [credit.model_dump() for credit in both.compensated.credits],
        "pins_without_compensation": both.plain.search.pins if both.plain.met else None,
        "unnecessary_pins": both.unnecessary,
    }


def _compensation_text(both: CompensatedPins) -> str:
    lines = [
        "",
        "compensation, tried first:",
        *(f"  {line}" for line in credit_lines(both.compensated.credits)),
    ]
    if both.plain.met:
        lines.append(
            f"pins needed without it: {len(both.plain.search.pins)}; unnecessary now: "
            f"{', '.join(both.unnecessary) or 'none'}"
        )
    else:
        lines.append("without it no set of pins met the target")
    return "\n".join([*lines, f"the pins belong to {both.model} with {both.table}"])


def _body(result: PinResult) -> dict[str, object]:
    info = result.report.search if result.report is not None else None
    return {
        "outcome": result.search.outcome,
        "verdict": result.verdict,
        "met_on_held_out": result.met,
        "met_on_engine": result.on_engine,
        "on_builds": result.builds.as_dict() if result.builds else None,
        "pins": result.search.pins,
        "pins_explained": [_explained(pin) for pin in pins_of(result.report)] if result.report else [],
        "idle": sorted(result.search.idle),
        "format": result.format,
        "minimal": result.search.minimal,
        "proof": result.proof,
        "unstable": result.unstable,
        "points": [point.model_dump() for point in info.points] if info is not None else [],
        "trials": result.trials,
        "forward_equivalents": result.forward_equivalents,
    }


def _explained(pin: Finding) -> dict[str, object]:
    """A pin's finding as JSON, in the report's own words."""
    return pin.model_dump(
        include={"layers", "kind", "title", "evidence", "share_removed", "share_reproduced"}
    )


def _text(result: PinResult, target: SearchTarget, out: str) -> str:
    where = "all batches" if result.all_batches else "held out"
    lines = [result.verdict, f"{where}: {_numbers(result.held_out)}"]
    if result.proof:
        lines.append(result.proof)
    lines += _pins(result)
    for name, metrics in result.rivals.items():
        word = "meets" if target.met(metrics) else "misses"
        lines.append(f"rival, everything in {name}: {word}; {_numbers(metrics)}")
    if result.on_engine is not None:
        lines.append(_on_engine(result))
    if result.builds is not None:
        lines += [f"  {note}" for note in result.builds.notes]
    passes = count(round(result.forward_equivalents), "forward pass", "forward passes")
    work = f"{count(result.trials, 'trial')}, {passes}"
    return "\n".join([*lines, f"{work}; files in {out}"])


def _on_engine(result: PinResult) -> str:
    """What confirming the plan on an engine came to."""
    ran = result.report is not None and any(output.engine for output in result.report.outputs)
    if result.builds is not None:
        return _on_builds(result.builds, bool(result.on_engine))
    if not result.on_engine:
        return "the engine MISSES the target" if ran else "the engine was NOT built as the plan asks"
    held = "and holds the target" if ran else "(types and kernels audited; it was not run here)"
    return f"the engine is built as the plan asks {held}"


def _on_builds(builds: OnBuilds, confirmed: bool) -> str:
    builds_made = count(builds.found.builds, "build")
    if confirmed:
        return f"the engine is built as the plan asks and holds the target ({builds_made}):"
    if not builds.met:
        return f"the engine MISSES the target ({builds_made}):"
    return f"the engine was NOT built as the plan asks, or missed when it was run again ({builds_made}):"


def _pins(result: PinResult) -> list[str]:
    """A few lines for each of the first pins: what it is, what it buys and costs, and why it is needed."""
    pins = pins_of(result.report) if result.report is not None else []
    lines = [line for pin in pins[:_SHOWN] for line in _pin_lines(pin)]
    more = len(pins) - _SHOWN
    return [*lines, f"  and {more} more, in {REPORT_FILE} and the plan"] if more > 0 else lines


def _pin_lines(pin: Finding) -> list[str]:
    said = pin.evidence
    lines = [f"  {pin.title}"]
    if pin.share_reproduced is not None and pin.share_removed is not None:
        lines.append(
            f"    alone: it makes {pin.share_reproduced:.0%} of the damage, raised alone it removes "
            f"{pin.share_removed:.0%}"
        )
    named = {
        "in the set": "in_the_set",
        "on builds": "on_builds",
        "why": "why",
        "costs": "price",
        "moves": "together",
    }
    lines += [f"    {name}: {said[key]}" for name, key in named.items() if key in said]
    lines += [f"    {said['idle']}"] if "idle" in said else []
    return [*lines, *([f"    unstable: {said['unstable']}"] if "unstable" in said else [])]


def _numbers(metrics: Metrics) -> str:
    shown = ("sqnr_db", "cosine", "top1", "kl")
    parts = [
        f"{name} " + ", ".join(f"{key} {found[key]:.4g}" for key in shown if key in found)
        for name, found in metrics.items()
    ]
    return "; ".join(parts)
