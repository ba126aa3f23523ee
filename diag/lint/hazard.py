"""What a lint rule says: a hazard, and the thresholds by which rules speak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from diag.resources import Rules, read_rules

QDQ = "qdq-structure"

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Hazard:
    """One kind of trouble, and all layers that have it."""

    id: str
    kind: str
    """A name of rules/finding_kinds.yaml."""
    severity: Severity
    layers: tuple[str, ...]
    title: str
    mend: str
    evidence: Mapping[str, float | str | bool] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    """Layers to keep in FP32."""


def hazards(
    rule: tuple[str, str, Severity], layers: Sequence[str], title: str, mend: str, **evidence: float | str
) -> list[Hazard]:
    """One hazard of `rule` (its id, kind and severity) on `layers`; none when there are no layers."""
    if not layers:
        return []
    name, kind, severity = rule
    return [Hazard(name, kind, severity, tuple(layers), title, mend, {"layers": len(layers), **evidence})]


def worst_first(found: Iterable[Hazard]) -> list[Hazard]:
    """Errors, then warnings, then notes."""
    order = ("error", "warning", "note")
    return sorted(found, key=lambda hazard: order.index(hazard.severity))


class LintRules(Rules):
    """Contents of rules/lint.yaml; what each number means stands there."""

    bias_warning_share: float
    reach: int
    mask_margin: float
    mask_magnitude: float
    lost_energy_error: float
    operand_sqnr_db: float
    headroom_warning: float
    angle_error: float


@cache
def lint_rules() -> LintRules:
    """The rules that ship with this release."""
    return read_rules("lint.yaml", LintRules)
