"""The bounds of rules/drift.yaml."""

from __future__ import annotations

from functools import cache
from typing import Literal

from diag.resources import Rules, read_rules


class Bound(Rules):
    """When one figure counts as drift; see rules/drift.yaml."""

    warn: float
    fail: float
    times_calibration: float = 0.0
    """Times what calibration shows of the same figure; 0 where calibration has none of its own."""


class Ratio(Rules):
    """A factor between production and calibration that betrays its cause."""

    of: Literal["width", "absmax"]
    ratio: float
    text: str


class DriftRules(Rules):
    """Contents of rules/drift.yaml."""

    figures: dict[str, Bound]
    null_margin: float
    least_requests: int
    range_within: float
    preprocessing: tuple[Ratio, ...]
    preprocessing_within: float
    swap_gain: float
    costly_db: float
    worth_db: float


@cache
def drift_rules() -> DriftRules:
    """The rules that ship with this release."""
    return read_rules("drift.yaml", DriftRules)
