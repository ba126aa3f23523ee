"""The numbers of rules/compensation.yaml."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from diag.resources import data_dir


class CompensationRules(BaseModel):
    """Contents of rules/compensation.yaml, where each is explained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


@lru_cache(maxsize=1)
def compensation_rules() -> CompensationRules:
    """The rules that ship with this release."""
    text = Path(data_dir("rules") / "compensation.yaml").read_text(encoding="utf-8")
    return CompensationRules.model_validate(yaml.safe_load(text))
