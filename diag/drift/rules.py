"""The bounds of rules/drift.yaml."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from diag.resources import data_dir


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bound(_Part):
    """When one figure counts as drift; see rules/drift.yaml."""

    warn: float
    fail: float
    times_calibration: float = 0.0
    """Times what calibration shows of the same figure; 0 where calibration has none of its own."""


class Ratio(_Part):
    """A factor between production and calibration that betrays its cause."""

    of: Literal["width", "absmax"]
    ratio: float
    text: str


class DriftRules(_Part):
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


@lru_cache(maxsize=1)
def drift_rules() -> DriftRules:
    """The rules that ship with this release."""
    text = Path(data_dir("rules") / "drift.yaml").read_text(encoding="utf-8")
    return DriftRules.model_validate(yaml.safe_load(text))
