"""The numbers of rules/compensation.yaml."""

from __future__ import annotations

from functools import cache

from diag.resources import Rules, read_rules


class CompensationRules(Rules):
    """Contents of rules/compensation.yaml, where each is explained."""

    alphas: tuple[float, ...]
    range_ratios: tuple[float, ...]
    weight_ratios: tuple[float, ...]
    most_split_share: float
    least_layer_gain_db: float
    least_output_gain_db: float
    least_output_gain_db_of_nodes: float
    least_batches_better: float
    judge_batches: int
    search_batches: int
    search_rows: int
    search_bytes: int
    fp32_rel_l2: float
    fp32_times_jitter: float


@cache
def compensation_rules() -> CompensationRules:
    """The rules that ship with this release."""
    return read_rules("compensation.yaml", CompensationRules)
