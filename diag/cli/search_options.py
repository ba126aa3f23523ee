"""Options that `rank` and `pin` share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from diag.errors import UsageError
from diag.gate.threshold import Threshold, parse_threshold
from diag.pipeline.build.settings import ENGINES
from diag.pipeline.search.settings import Ceiling

Target = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="CHECK", help='What must hold, e.g. "cosine>=0.99". Repeatable.'),
]
Holdout = Annotated[
    str | None,
    typer.Option(
        "--holdout", metavar="DATA", help="Data to prove pins on; without it the last third of --data."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="Time to search, half of it to rank, e.g. 90s, 5m, 1h."),
]

Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="FILE.py:FUNCTION",
        help="Your own metric, function(outputs, labels) -> number for each batch, named by --target. Labels "
        "are the arrays of a batch that are no inputs. Runs the file.",
    ),
]
Ranking = Annotated[
    str | None,
    typer.Option("--ranking", metavar="FILE", help="A ranking.json to use, edited if you like."),
]
MaxPins = Annotated[int | None, typer.Option("--max-pins", metavar="N", help="Pin so many at most.")]
MaxPrice = Annotated[
    str | None,
    typer.Option("--max-price", metavar="TIME", help="Time that pins may add: 0.2ms, or 10% of the plan's."),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--prices",
        metavar="REPORT",
        help="Report with kernel times (inspect --times); one for each format that was timed. Repeatable. "
        "Without: an estimate.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", metavar="N", help="Processes that measure.")]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Ray cluster that measures (host:port, auto, or local)."),
]
Confirm = Annotated[
    str | None,
    typer.Option(
        "--confirm",
        metavar="ENGINE",
        help="Hold the plan to the target on tensorrt or tensorrt-rtx; search on builds where it misses.",
    ),
]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def targets_of(texts: Sequence[str], metric: str | None) -> tuple[Threshold, ...]:
    """The target, which may name the user's own metric. Raises UsageError."""
    own = (metric.rpartition(":")[2],) if metric else ()
    return tuple(parse_threshold(text, own) for text in texts)


def workers_of(jobs: int) -> int:
    """Processes that measure. Raises UsageError."""
    if jobs < 1:
        raise UsageError(f"{jobs} jobs measure nothing", "Give 1 or more.")
    return jobs


def ceiling_of(pins: int | None, price: str | None) -> Ceiling:
    """What pins may cost. Raises UsageError."""
    if pins is not None and pins < 0:
        raise UsageError(f"a ceiling of {pins} pins means nothing", "Give 0 or more.")
    if price is None:
        return Ceiling(pins)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|%)", price.strip())
    if found is None:
        raise UsageError(f"{price!r} is no price", "Write 0.2ms, or 10%.")
    value = float(found[1])
    return Ceiling(pins, price_ms=value) if found[2] == "ms" else Ceiling(pins, price_share=value / 100)


def engine_of(name: str | None) -> str | None:
    """The engine to confirm on. Raises UsageError."""
    if name not in (None, *ENGINES):
        raise UsageError(f"there is no engine {name!r} to confirm on", f"Choose {' or '.join(ENGINES)}.")
    return name


def seconds_of(text: str | None) -> float:
    """A time; without any, as long as it takes. Raises UsageError."""
    if text is None:
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"{text!r} is no time", "Write 90s, 5m or 1h.")
    return float(found[1]) * _UNITS[found[2]]
