"""Rules on constants that a float format cannot hold: masks, counts, weights, the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.lint.hazard import Hazard, Severity, hazards, lint_rules
from diag.lint.lowered import Lowered
from diag.lint.walks import MASKS, feeds_softmax
from diag.model.graph import Layer, Model
from diag.numerics.formats import Format, round_to
from diag.plan.layers import INDEX_INPUTS
from diag.typed.operands import constant_value

_BLOCK = 1 << 20
"""Elements that are looked at together."""

_BOUNDS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "Clip": ((1, -1), (2, 1)),
    "Min": ((0, 1), (1, 1)),
    "Max": ((0, -1), (1, -1)),
}
"""Inputs whose constant may be beyond the range on this side: a bound that no value of the format reaches."""

_COMPARES = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


def check_constants(lowered: Lowered, out_of_range: str) -> Iterator[Hazard]:
    """Hazards of constants. `out_of_range` is the plan's policy, clamp or inf."""
    found = _Found(lowered)
    for layer in lowered.layers:
        for index, name in enumerate(layer.inputs):
            if name and index not in INDEX_INPUTS.get(layer.op_type, ()):
                found.look(layer, index, name)
    yield from found.hazards("error" if out_of_range == "inf" else "warning")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What rounding to a format does to a constant."""

    largest: float
    """The finite element of the largest magnitude, with its sign."""
    size: int
    beyond: int
    """Finite elements beyond the range."""
    lost_energy: float
    """Energy of the rounding error of the elements within the range, over the energy of these."""


class _Found:
    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._facts: dict[tuple[str, str], _Facts | None] = {}
        self.masks: dict[str, float] = {}
        self.near_masks: dict[str, float] = {}
        self.divisors: dict[str, float] = {}
        self.beyond: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def look(self, layer: Layer, index: int, name: str) -> None:
        fmt = self._lowered.format_of(layer)
        key = (name, fmt.name)
        if key not in self._facts:
            value = constant_value(self._lowered.model, name)
            floats = value is not None and value.dtype in (np.float32, np.float64)
            self._facts[key] = _facts(value, fmt) if value is not None and floats else None
        facts = self._facts[key]
        if facts is not None:
            self._judge(layer, index, facts, fmt)

    def _judge(self, layer: Layer, index: int, facts: _Facts, fmt: Format) -> None:
        rules, model = lint_rules(), self._lowered.model
        if facts.beyond:
            if layer.op_type in _COMPARES or _is_bound(layer, index, facts.largest):
                return
            if layer.op_type in MASKS and feeds_softmax(model, layer, rules.reach):
                self.masks[layer.id] = facts.largest
            elif _is_count(model, layer, index):
                self.divisors[layer.id] = facts.largest
            else:
                self.beyond[layer.id] = facts.largest
        elif -facts.largest > fmt.max - rules.mask_margin:
            if layer.op_type in MASKS and feeds_softmax(model, layer, rules.reach):
                self.near_masks[layer.id] = facts.largest
        elif facts.size > 1 and facts.lost_energy > rules.lost_energy_error:
            self.weights[layer.id] = facts.lost_energy

    def hazards(self, masks: Severity) -> Iterator[Hazard]:
        name = "/".join(sorted({fmt.upper() for fmt in self._lowered.floats.values()}))
        advice = "Use a mask value between -1e4 and -3e4."
        yield from hazards(
            ("mask-constant", "mask-constant", masks),
            list(self.masks),
            f"{len(self.masks)} mask constants are beyond the {name} range, first {_first(self.masks)}: "
            "clamped as a constant (TensorRT 8.6 and later), minus infinity where it is computed, and 0 x "
            "inf is NaN",
            advice,
            **_worst(self.masks),
        )
        yield from hazards(
            ("mask-near-limit", "mask-constant", "warning"),
            list(self.near_masks),
            f"{len(self.near_masks)} mask constants leave the {name} range once a score is added, first "
            f"{_first(self.near_masks)}",
            advice,
            **_worst(self.near_masks),
        )
        yield from hazards(
            ("divisor-beyond-range", "reduction-accumulation", "error"),
            list(self.divisors),
            f"{len(self.divisors)} sums are divided by a count beyond the {name} range, first "
            f"{_first(self.divisors)}",
            "Use ReduceMean, or keep the sum and the division in FP32.",
            **_worst(self.divisors),
        )
        yield from hazards(
            ("constant-beyond-range", "weight-conversion", "error"),
            list(self.beyond),
            f"{len(self.beyond)} layers read constants beyond the {name} range, first {_first(self.beyond)}",
            "Keep these layers in FP32 or BF16, or rescale the constants.",
            **_worst(self.beyond),
        )
        yield from hazards(
            ("weights-vanish", "weight-conversion", "error"),
            list(self.weights),
            f"{len(self.weights)} layers lose weights too small for {name}, first {_first(self.weights)} "
            "(share of their energy)",
            "Keep these layers in FP32 or BF16, or scale the weights up.",
            **_worst(self.weights),
        )


def _facts(value: NDArray[np.generic], fmt: Format) -> _Facts:
    flat = value.reshape(-1)
    largest, beyond, lost, energy = 0.0, 0, 0.0, 0.0
    for start in range(0, flat.size, _BLOCK):
        block = np.asarray(flat[start : start + _BLOCK], np.float32)
        block = block[np.isfinite(block)]
        if not block.size:
            continue
        top = float(block[np.argmax(np.abs(block))])
        largest = top if abs(top) > abs(largest) else largest
        rounded = round_to(block, fmt)
        held = np.isfinite(rounded)
        beyond += int(np.count_nonzero(np.abs(block) > fmt.max))
        error = (block[held] - rounded[held]).astype(np.float64)
        lost += float(error @ error)
        energy += float(np.square(block[held], dtype=np.float64).sum())
    return _Facts(largest, flat.size, beyond, lost / energy if energy else 0.0)


def _is_bound(layer: Layer, index: int, value: float) -> bool:
    sides = _BOUNDS.get(layer.op_type, ())
    return any(place == index and value * side > 0 for place, side in sides)


def _is_count(model: Model, layer: Layer, index: int) -> bool:
    producer = model.producers.get(layer.inputs[0])
    summed = producer is not None and producer.op_type in ("ReduceSum", "ReduceSumSquare")
    return layer.op_type == "Div" and index == 1 and summed


def _first(found: Mapping[str, float]) -> str:
    name = next(iter(found), "")
    return f"{name} ({found[name]:.4g})" if name else ""


def _worst(found: Mapping[str, float]) -> dict[str, float]:
    return {"worst": max(found.values(), key=abs)} if found else {}
