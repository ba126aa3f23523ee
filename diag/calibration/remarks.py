"""What a table gives reason to worry about: clipped energy, unstable ranges, odd tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diag.calibration.table import BEST, IMPORTED, CalibrationTable, MethodRange
from diag.numerics.calibrate import METHODS

CLIPPED_WARNING, CLIPPED_ERROR = 0.01, 0.05
"""Clipped energy over all energy: beyond these, clipping alone limits a tensor to 20 and 13 dB."""
UNSTABLE = 0.05
"""Relative difference between the ranges of two halves of the data."""

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Remark:
    """One kind of trouble with one method's ranges, or with tensors as such (`method` empty)."""

    kind: str
    severity: Severity
    method: str
    tensors: Mapping[str, float | None]
    """Tensors with the figure in question, worst first."""
    text: str


_FLAGS: dict[str, tuple[Severity, str]] = {
    "empty": ("warning", "never held an element, so they have no range"),
    "zero": ("warning", "are zero throughout; any scale represents them, and 1 / 127 is taken"),
    "constant": ("note", "hold one and the same value throughout"),
    "coarse": (
        "warning",
        "have a few values over 100 times as large as the rest: their percentile, entropy and MSE ranges are "
        "only as fine as a few bins",
    ),
    "zero_channels": ("note", "have channels that are zero throughout"),
}


def remarks(table: CalibrationTable) -> list[Remark]:
    """Everything remarkable, of every method that the table holds; errors first."""
    found = _flagged(table)
    for method in measured_methods(table):
        costs = costs_of(table, method)
        found += _clipped(method, costs) + _unstable(method, costs)
    order = ("error", "warning", "note")
    return sorted(found, key=lambda remark: order.index(remark.severity))


def measured_methods(table: CalibrationTable) -> list[str]:
    """Methods that the table holds for at least one tensor."""
    return [method for method in (*METHODS, BEST, IMPORTED) if costs_of(table, method)]


def costs_of(table: CalibrationTable, method: str) -> dict[str, MethodRange]:
    """Range and cost of each tensor that the method was measured on."""
    found = {name: tensor.cost_of(method) for name, tensor in table.tensors.items()}
    return {name: cost for name, cost in found.items() if cost is not None}


def _flagged(table: CalibrationTable) -> list[Remark]:
    found = []
    for flag, (severity, text) in _FLAGS.items():
        names = {name: None for name, tensor in table.tensors.items() if flag in tensor.flags}
        if names:
            found.append(Remark(flag, severity, "", names, text))
    bad = {name: float(t.nonfinite) for name, t in table.tensors.items() if t.nonfinite}
    if bad:
        found.append(
            Remark("nonfinite", "warning", "", _worst_first(bad), "were not finite in batches left out")
        )
    return found


def _clipped(method: str, costs: Mapping[str, MethodRange]) -> list[Remark]:
    known = {name: cost.clipped_energy_ratio for name, cost in costs.items()}
    shares = {name: share for name, share in known.items() if share is not None}
    error = {name: share for name, share in shares.items() if share > CLIPPED_ERROR}
    warning = {name: share for name, share in shares.items() if CLIPPED_WARNING < share <= CLIPPED_ERROR}
    found = []
    if error:
        found.append(Remark("clipped", "error", method, _worst_first(error), "lose over 5 % of their energy"))
    if warning:
        text = "lose over 1 % of their energy"
        found.append(Remark("clipped", "warning", method, _worst_first(warning), text))
    return found


def _unstable(method: str, costs: Mapping[str, MethodRange]) -> list[Remark]:
    differ = {name: cost.halves_differ for name, cost in costs.items()}
    found = {name: value for name, value in differ.items() if value is not None and value > UNSTABLE}
    text = "have ranges that differ over 5 % between two halves of the data"
    return [Remark("unstable", "warning", method, _worst_first(found), text)] if found else []


def _worst_first(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: figures[name] for name in sorted(figures, key=figures.__getitem__, reverse=True)}
