"""What the parts of the contract have in common: no unknown keys, and numbers that may be NaN or infinite."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _read_number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _write_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


Number = Annotated[
    float,
    BeforeValidator(_read_number),
    PlainSerializer(_write_number),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(_NON_FINITE)}]}),
]
"""A float; JSON has no NaN and no Infinity, so these three are written as strings."""

Metrics = dict[str, Number]
"""Values by metric name; names, units and directions are in `diag.numerics.metrics.METRICS`."""

STRICT = ConfigDict(extra="forbid")
"""Of all parts: unknown keys are refused, so that a misspelt field is never silently lost."""
