"""The rule on small constants that keep a divisor, or a logarithm's argument, away from zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diag.lint.hazard import Hazard, Severity, lint_rules
from diag.lint.lowered import Extremes, Lowered
from diag.lint.walks import SHIFTS, becomes_one, becomes_zero, constants_before
from diag.model.graph import Layer, Model
from diag.numerics.formats import Format

_GUARDED = frozenset({"Div", "Reciprocal", "Log", "Pow"})
_THROUGH = SHIFTS | {"Sqrt", "Abs", "Cast", "Identity", "Expand"}


@dataclass(frozen=True)
class _Guard:
    """A constant that vanishes, and the layers from it to the division or logarithm."""

    path: tuple[Layer, ...]
    value: float
    bound: bool
    """A bound just below 1, which becomes 1; else a constant just above 0, which becomes 0."""


def check_guards(lowered: Lowered, measured: Mapping[str, Extremes]) -> Iterator[Hazard]:
    """Guards that are 0 (or, as bounds, 1) in the format.

    Without data a warning; with data an error where values reach the guard, and a note where none does.
    """
    found: dict[Severity, list[_Guard]] = {}
    for layer in lowered.layers:
        guard = _vanished(lowered, layer)
        if guard is not None:
            found.setdefault(_severity(lowered.model, guard, measured), []).append(guard)
    for severity, guards in found.items():
        yield _hazard(lowered, severity, guards)


def _hazard(lowered: Lowered, severity: Severity, guards: list[_Guard]) -> Hazard:
    first = guards[0]
    fmt = lowered.format_of(first.path[0]).name.upper()
    names = tuple(dict.fromkeys(layer.id for guard in guards for layer in guard.path))
    reached = {"error": ", and values reach it", "note": ", but no value reaches it", "warning": ""}[severity]
    return Hazard(
        f"small-constant-{severity}",
        "small-constant",
        severity,
        names,
        f"{_many(len(guards))} guarded by a constant that vanishes in {fmt}{reached}: "
        f"first {first.value:.9g} at {first.path[0].id}, before {first.path[-1].id}",
        "Raise the constant (1e-5 is safe in FP16), or keep these layers in FP32.",
        {"layers": len(names), "guards": len(guards), "constant": first.value},
        names if severity != "note" else (),
    )


def _many(guards: int) -> str:
    return "a division or logarithm is" if guards == 1 else f"{guards} divisions or logarithms are"


def _severity(model: Model, guard: _Guard, measured: Mapping[str, Extremes]) -> Severity:
    data = [name for name in guard.path[0].inputs if name in model.value_dependent]
    known = [measured[name] for name in data if name in measured]
    if not known:
        return "warning"
    if guard.bound:
        reached = max(x.maximum for x in known) >= guard.value
    else:
        reached = min(x.minimum for x in known) <= abs(guard.value)
    return "error" if reached else "note"


def _vanished(lowered: Lowered, layer: Layer) -> _Guard | None:
    if layer.op_type not in _GUARDED or not _divides(lowered.model, layer):
        return None
    guarded = layer.inputs[1:2] if layer.op_type == "Div" else layer.inputs[:1]
    for path, values in constants_before(lowered.model, layer, _THROUGH, lint_rules().reach + 1, guarded):
        guard = path[0]
        if guard is layer or guard.op_type not in SHIFTS or guard.id not in lowered.floats:
            continue
        fmt = lowered.format_of(guard)
        for value in values:
            bound = _is_upper_bound(path, value, fmt)
            if bound or becomes_zero(value, fmt):
                return _Guard(tuple(path), float(value.reshape(-1)[0]), bound)
    return None


def _is_upper_bound(path: Sequence[Layer], value: np.ndarray, fmt: Format) -> bool:
    """Whether a bound becomes 1, where 1 minus what it bounds is to stay above zero."""
    subtracted = any(layer.op_type == "Sub" for layer in path[1:])
    return path[0].op_type in ("Clip", "Min") and subtracted and becomes_one(value, fmt)


def _divides(model: Model, layer: Layer) -> bool:
    """A power divides when its exponent is negative."""
    if layer.op_type != "Pow":
        return True
    exponent = model.constant(layer.inputs[1])
    return exponent is not None and bool((np.asarray(exponent, np.float64) < 0).all())
