"""`trtdiag rank`: what each layer costs, alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
from diag.pipeline.search.ranking_file import Row, finite, rows_of, stopped_by
from diag.pipeline.search.settings import RANKING_FILE, SearchSettings
from diag.render.cells import count
from diag.render.text import clean
from diag.search.rank import Effect, Ranking
from diag.search.target import Target as SearchTarget

NAME = "rank"
HELP = (
    "Measure every lowered layer alone: the damage when only it is lowered, the gain when only it is raised."
)
EXAMPLE = "Example: trtdiag rank model.onnx --format int8 --data batches/ --out ranking"

_SHOWN = 12

_AGREES = 0.5
"""Kendall's tau from which the two orders agree (three of four pairs)."""


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
    rows = rows_of(Path(out) / RANKING_FILE)
    target_text = str(SearchTarget(settings.target))
    body = {
        "ranking": f"{out}/{RANKING_FILE}",
        "target": target_text,
        "total_damage": finite(ranking.total),
        "settled": ranking.settled,
        "stopped": stopped_by(ranking),
        "batches": ranking.batches,
        "kendall_tau": ranking.kendall_tau,
        "unmeasured": ranking.unmeasured,
        "worst": [effect.candidate.id for effect in _shown(ranking)],
        "groups": [_group(effect, rows[effect.candidate.id]) for effect in _shown(ranking)],
    }
    Output(as_json, quiet).result(
        body, lambda: Group(_table(ranking, rows), _legend(ranking, target_text, out))
    )
    return 0


def _shown(ranking: Ranking) -> list[Effect]:
    return [effect for effect in ranking.effects[:_SHOWN] if effect.lowered]


def _group(effect: Effect, row: Row) -> dict[str, object]:
    return {
        "layers": row.layers,
        "role": row.role,
        "block": row.block,
        "lowered_damage": finite(effect.lowered_mean),
        "raised_gain": finite(effect.raised_mean),
        "relative_spread": finite(effect.spread),
        "batches": len(effect.lowered),
    }


def _table(ranking: Ranking, rows: Mapping[str, Row]) -> Table:
    """The worst candidates; names of layers may be long, and fold."""
    table = Table(box=None)
    table.add_column("layer", overflow="fold")
    table.add_column("role", no_wrap=True)
    for title in ("block", "damage,\nlowered alone", "removed,\nraised alone", "spread", "batches"):
        table.add_column(title, justify="right", no_wrap=True)
    for effect in _shown(ranking):
        row = rows[effect.candidate.id]
        more = f" and {len(row.layers) - 1} more" if len(row.layers) > 1 else ""
        values = (effect.lowered_mean, effect.raised_mean)
        shown = [_number(value) for value in values]
        spread = f"±{effect.spread:.0%}" if math.isfinite(effect.spread) else "-"
        block = "-" if row.block is None else str(row.block)
        table.add_row(
            Text(clean(f"{effect.candidate.id}{more}")),
            row.role,
            block,
            *shown,
            spread,
            str(len(effect.lowered)),
        )
    return table


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _legend(ranking: Ranking, target: str, out: str) -> Text:
    """What the columns mean, and how far the order can be trusted."""
    left_out = len(ranking.effects) - len(_shown(ranking))
    masked = "" if ranking.kendall_tau >= _AGREES else ": causes mask each other"
    lines = [
        f"Damage: 1 is what {target} allows; with all lowered it is {_number(ranking.total)}. "
        "Spread: standard deviation over the batches, relative to the mean.",
        f"Work ended because {stopped_by(ranking)} ({count(ranking.batches, 'batch', 'batches')}). "
        f"Kendall's tau of the two orders is {ranking.kendall_tau:.2f}{masked}.",
        f"{f'{left_out} more, and the' if left_out > 0 else 'The'} file to edit: {out}/{RANKING_FILE}",
    ]
    return Text("\n".join(lines))
