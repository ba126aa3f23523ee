"""`trtdiag rank`: what each layer costs, alone."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.table import Table

from diag.cli import options
from diag.cli.console import Output, command_line, with_bar
from diag.cli.search_options import (
    Budget,
    Holdout,
    Jobs,
    Metric,
    Ray,
    Target,
    seconds_of,
    targets_of,
    workers_of,
)
from diag.pipeline.search.job import rank_layers
from diag.pipeline.search.settings import RANKING_FILE, SearchSettings
from diag.search.rank import Effect, Ranking

NAME = "rank"
HELP = (
    "Measure every lowered layer alone: the damage when only it is lowered, the gain when only it is raised."
)
EXAMPLE = "Example: trtdiag rank model.onnx --format int8 --data batches/ --out ranking"

_SHOWN = 12


def run(
    model: options.Model,
    data: options.Data,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help=f"Folder for {RANKING_FILE}.")],
    target: Target = None,
    plan: options.Plan = None,
    format_: options.Format = None,
    calibration: options.Calibration = None,
    holdout: Holdout = None,
    limit: options.Limit = None,
    budget: Budget = None,
    metric: Metric = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = SearchSettings(
        model=model,
        data=data,
        out=out,
        target=targets_of(target or ["sqnr_db>=30"], metric),
        plan=plan,
        format=format_,
        calibration=calibration,
        holdout=holdout,
        limit=limit,
        budget_s=seconds_of(budget),
        metric=metric,
        jobs=workers_of(jobs),
        ray=ray,
        command=command_line(),
    )
    ranking = with_bar(quiet or as_json, lambda progress: rank_layers(settings, progress))
    body = {
        "ranking": f"{out}/{RANKING_FILE}",
        "settled": ranking.settled,
        "batches": ranking.batches,
        "kendall_tau": ranking.kendall_tau,
        "unmeasured": ranking.unmeasured,
        "worst": [effect.candidate.id for effect in _shown(ranking)],
    }
    Output(as_json, quiet).result(body, lambda: _table(ranking))
    return 0


def _shown(ranking: Ranking) -> list[Effect]:
    return [effect for effect in ranking.effects[:_SHOWN] if effect.lowered]


def _table(ranking: Ranking) -> Table:
    state = "settled" if ranking.settled else "not settled"
    caption = f"{ranking.batches} batches, order {state}, Kendall tau {ranking.kendall_tau:.2f}"
    if ranking.unmeasured:
        caption += f"; {ranking.unmeasured} not measured within the budget"
    table = Table("layer", "lowered alone", "gain raised alone", "spread", box=None, caption=caption)
    for effect in _shown(ranking):
        values = (effect.lowered_mean, effect.raised_mean)
        shown = [f"{value:.3g}" if math.isfinite(value) else "not finite" for value in values]
        spread = f"{effect.spread:.0%}" if math.isfinite(effect.spread) else "-"
        table.add_row(effect.candidate.id, *shown, spread)
    return table
