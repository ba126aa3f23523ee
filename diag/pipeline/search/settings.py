"""What `rank` and `pin` are asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from diag.gate.threshold import Threshold

TRIALS_FILE = ".trials.sqlite"
RANKING_FILE = "ranking.json"


@dataclass(frozen=True)
class Ceiling:
    """How much pins may cost. None: no limit."""

    pins: int | None = None
    """Most layers and groups that may be pinned."""
    price_ms: float | None = None
    """Most milliseconds that pins may add; needs measured prices."""
    price_share: float | None = None
    """Most that pins may add, as a share of the time of the plan without pins."""


@dataclass(frozen=True)
class BeforePins:
    """What compensation did to a model before pins were searched for it."""

    credits: tuple[str, ...]
    """What each step brought, in words."""
    plain_pins: tuple[str, ...] | None
    """Pins that the model needs without it; None when no pins were enough."""


@dataclass(frozen=True)
class SearchSettings:
    """Options of `rank` and `pin`, in their terms."""

    model: str
    data: str
    out: str
    target: tuple[Threshold, ...]
    plan: str | None = None
    format: str | None = None
    calibration: str | None = None
    holdout: str | None = None
    limit: int | None = None
    budget_s: float = math.inf
    command: str = "trtdiag pin"
    metric: str | None = None
    """FILE.py:function, a metric of the user's own; its name is the function's."""
    ceiling: Ceiling = field(default_factory=Ceiling)
    prices: tuple[str, ...] = ()
    """Reports with kernel times."""
    ranking: str | None = None
    """A ranking.json to search with instead of measuring one."""
    jobs: int = 1
    ray: str | None = None
    """Address of a Ray cluster that measures."""
    confirm: str | None = None
    """`tensorrt` or `tensorrt-rtx`: build the final plan and hold it to the target there."""
    before: BeforePins | None = None
    """None for a model as it came."""
