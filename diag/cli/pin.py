"""`trtdiag pin`: the smallest set of layers to keep in higher precision."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, with_bar
from diag.cli.search_options import Budget, Holdout, Target, settings_of
from diag.pipeline.search import PinResult, pin_layers
from diag.pipeline.trials import Metrics
from diag.search.target import Target as SearchTarget

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
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = settings_of(model, data, out, target or [], plan, format_, calibration, holdout, limit, budget)
    result = with_bar(quiet or as_json, lambda progress: pin_layers(settings, progress))
    wanted = SearchTarget(settings.target)
    met = result.search.outcome != "impossible" and wanted.met(result.held_out)
    Output(as_json, quiet).result(_body(result, met), lambda: _text(result, wanted, met, out))
    return 0 if met else 1


def _body(result: PinResult, met: bool) -> dict[str, object]:
    return {
        "outcome": result.search.outcome,
        "met_on_held_out": met,
        "pins": result.search.pins,
        "format": result.format,
        "minimal": result.search.minimal,
        "unstable": result.unstable,
        "trials": result.trials,
        "forward_equivalents": result.forward_equivalents,
    }


def _text(result: PinResult, target: SearchTarget, met: bool, out: str) -> str:
    lines = [_headline(result, target, met), f"held out: {_numbers(result.held_out)}"]
    effects = {effect.candidate.id: effect for effect in result.ranking.effects}
    for pin in result.search.pins[:12] if result.search.outcome == "found" else []:
        effect = effects[pin]
        total = result.ranking.total or 1.0
        mark = "  (unstable between halves of the data)" if pin in result.unstable else ""
        lines.append(
            f"  {pin}: alone it makes {effect.lowered_mean / total:.0%} of the damage, "
            f"raised alone it removes {effect.raised_mean / total:.0%}{mark}"
        )
    for name, metrics in result.rivals.items():
        word = "meets" if target.met(metrics) else "misses"
        lines.append(f"rival, everything in {name}: {word}; {_numbers(metrics)}")
    lines.append(f"{result.trials} trials, {result.forward_equivalents:.0f} forward passes; files in {out}")
    return "\n".join(lines)


def _headline(result: PinResult, target: SearchTarget, met: bool) -> str:
    search = result.search
    if search.outcome == "not-needed":
        return f"{target} holds without any pin"
    if search.outcome == "impossible" or not met:
        return f"{target} cannot be met, even with every candidate raised"
    proof = "1-minimal (proven on the data it was chosen on)" if search.minimal else "not proven minimal"
    return f"{target} holds with {len(search.pins)} pin(s) in {result.format}: {proof}"


def _numbers(metrics: Metrics) -> str:
    shown = ("sqnr_db", "cosine", "top1", "kl")
    parts = [
        f"{name} " + ", ".join(f"{key} {found[key]:.4g}" for key in shown if key in found)
        for name, found in metrics.items()
    ]
    return "; ".join(parts)
