"""When scales that others made are doubted: thresholds from rules/scales.yaml."""

from __future__ import annotations

from functools import cache

from diag.resources import Rules, read_rules


class ScaleRules(Rules):
    """Contents of rules/scales.yaml; what each number means stands there."""

    shared_share: float
    coverage_share: float
    fit_share: float
    ratio_warning: float
    ratio_error: float


@cache
def scale_rules() -> ScaleRules:
    """The rules that ship with this release."""
    return read_rules("scales.yaml", ScaleRules)
