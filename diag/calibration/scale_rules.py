"""When scales that others made are doubted: thresholds from rules/scales.yaml."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from diag.resources import data_dir


class ScaleRules(BaseModel):
    """Contents of rules/scales.yaml; what each number means stands there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared_share: float
    coverage_share: float
    fit_share: float
    ratio_warning: float
    ratio_error: float


@lru_cache(maxsize=1)
def scale_rules() -> ScaleRules:
    """The rules that ship with this release."""
    text = Path(data_dir("rules") / "scales.yaml").read_text(encoding="utf-8")
    return ScaleRules.model_validate(yaml.safe_load(text))
