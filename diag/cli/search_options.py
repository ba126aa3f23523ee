"""Options that `rank` and `pin` share."""

from __future__ import annotations

import math
import re
import shlex
import sys
from typing import Annotated

import typer

from diag.errors import UsageError
from diag.gate.threshold import parse_threshold
from diag.pipeline.search import SearchSettings

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
    str | None, typer.Option("--budget", metavar="TIME", help="Time for the ranking, e.g. 90s, 5m, 1h.")
]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def settings_of(
    model: str,
    data: str,
    out: str,
    target: list[str],
    plan: str | None,
    fmt: str | None,
    calibration: str | None,
    holdout: str | None,
    limit: int | None,
    budget: str | None,
) -> SearchSettings:
    """The options as settings. Raises UsageError for a malformed target or budget."""
    return SearchSettings(
        model=model,
        data=data,
        out=out,
        target=tuple(parse_threshold(text) for text in target),
        plan=plan,
        format=fmt,
        calibration=calibration,
        holdout=holdout,
        limit=limit,
        budget_s=_seconds(budget),
        command=shlex.join(["trtdiag", *sys.argv[1:]]),
    )


def _seconds(text: str | None) -> float:
    if text is None:
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"{text!r} is no time", "Write 90s, 5m or 1h.")
    return float(found[1]) * _UNITS[found[2]]
