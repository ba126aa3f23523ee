"""Whether production differs from calibration: effect sizes against bounds and against calibration itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diag.drift import distance
from diag.drift.requests import ratio_low
from diag.drift.rules import Bound, DriftRules
from diag.drift.side import Side
from diag.drift.spread import absmax, quantile

Level = Literal["ok", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")
"""From good to bad."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a tensor, and what it is held against."""

    value: float
    calibration: float | None
    """What the calibration data show of it under the same range; None where it compares the two."""
    null: float | None
    """What one half of the calibration data shows against the other; None without halves."""
    level: Level


@dataclass(frozen=True, slots=True)
class Judged:
    """One tensor. `figures` are the judged ones, by the names of rules/drift.yaml."""

    name: str
    level: Level
    figures: Mapping[str, Figure]
    nonfinite: int

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the figures at the tensor's level, the primary one first."""
        return tuple(name for name, figure in self.figures.items() if figure.level == self.level != "ok")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer over all tensors."""

    level: Level
    cause: str | None
    """The first tensor in graph order at the verdict's level."""
    consequences: tuple[str, ...]
    """Tensors behind the cause that drift too, in graph order."""


def measure(calibration: Side, production: Side) -> dict[str, float]:
    """The judged figures of production, in the order of rules/drift.yaml."""
    lost = calibration.noise.sqnr_db - production.noise.sqnr_db
    return {
        "sqnr_loss_db": lost if calibration.noise.signal else 0.0,
        **_own(production),
        "wasserstein_steps": distance.wasserstein(calibration.spread, production.spread),
    }


def _own(side: Side) -> dict[str, float]:
    """Figures that speak of one side alone."""
    return {
        "saturation": side.saturation,
        "overflow": distance.overflow(side.spread),
        "under_use": distance.under_use(side.spread),
    }


def null_figures(calibration: Side) -> dict[str, float] | None:
    """What the halves of the calibration data show against each other, the worse way round.

    Each half is in turn what is calibrated on (its range as much narrower as its values are) and what is
    judged. None when there are no two halves with values.
    """
    if len(calibration.halves) != 2 or not all(absmax(half.spread) for half in calibration.halves):
        return None
    first, second = calibration.halves
    both = [_as_calibrated_on(calibration, first, second), _as_calibrated_on(calibration, second, first)]
    return {name: max(figures[name] for figures in both) for name in both[0]}


def _as_calibrated_on(whole: Side, half: Side, other: Side) -> dict[str, float]:
    factor = _end(whole, whole) / max(_end(half, whole), 1e-12)
    return measure(half.scaled(factor), other.scaled(factor))


def _end(side: Side, whole: Side) -> float:
    """Where a side's values end: the quantile at which the range of the whole lies; its maximum if none is
    beyond the range."""
    beyond = distance.saturation(whole.spread)
    return quantile(side.spread, 1 - beyond) if beyond else absmax(side.spread)


def judge_tensor(name: str, calibration: Side, production: Side, rules: DriftRules) -> Judged:
    """Judge one tensor. Both sides are in steps of the calibrated scale."""
    values, own = measure(calibration, production), _own(calibration)
    null = null_figures(calibration)
    figures = {
        key: _figure(value, own.get(key), None if null is None else null[key], rules.figures[key], rules)
        for key, value in values.items()
    }
    if values["wasserstein_steps"] <= rules.null_margin * _apart(production):
        figures["wasserstein_steps"] = replace(figures["wasserstein_steps"], level="ok")
    if loss_low(calibration, production) <= 0:
        figures["sqnr_loss_db"] = replace(figures["sqnr_loss_db"], level="ok")
    if _of_few(production):
        for key in ("saturation", "overflow"):
            figures[key] = replace(figures[key], level=min(figures[key].level, "warn", key=LEVELS.index))
    level: Level = max((figure.level for figure in figures.values()), key=LEVELS.index)
    if production.nonfinite and not calibration.nonfinite:
        level = "fail"
    return Judged(name, level, figures, production.nonfinite)


def _apart(production: Side) -> float:
    """How far the halves of production are apart, in steps: few values are never quite like many. Infinite
    when all of its requests, so few they are, fell into one half; 0 where requests were not kept apart."""
    if len(production.halves) != 2:
        return 0.0 if production.requests is None else math.inf
    return distance.wasserstein(*(half.spread for half in production.halves))


def _of_few(production: Side) -> bool:
    """Whether clipping rests on very few requests: nothing of it is sure."""
    requests, share = production.requests, production.saturation
    return requests is not None and share > 0 and ratio_low(share, requests.saturation_variance) == 0


def loss_low(calibration: Side, production: Side) -> float:
    """Lower end of the loss of SQNR in dB, over draws of as many requests: -inf when very few make all of
    it. Infinite where requests were not kept apart."""
    if production.requests is None:
        return math.inf
    noise = production.noise
    ratio = (noise.rounding + noise.clipped) / noise.signal if noise.signal else 0.0
    low = ratio_low(ratio, production.requests.noise_variance)
    return calibration.noise.sqnr_db + (10 * math.log10(low) if low else -math.inf)


def _figure(value: float, own: float | None, null: float | None, bound: Bound, rules: DriftRules) -> Figure:
    floor = max((own or 0.0) * bound.times_calibration, (null or 0.0) * rules.null_margin)
    level: Level = "ok"
    if value > floor and not math.isnan(value):
        level = "fail" if value > bound.fail else "warn" if value > bound.warn else "ok"
    return Figure(value, own, null, level)


def verdict_of(judged: Sequence[Judged]) -> Verdict:
    """The verdict over tensors in graph order: the first that drifts is the cause, the others follow it."""
    level: Level = max((tensor.level for tensor in judged), key=LEVELS.index, default=LEVELS[0])
    if level == "ok":
        return Verdict("ok", None, ())
    place = next(n for n, tensor in enumerate(judged) if tensor.level == level)
    behind = tuple(tensor.name for tensor in judged[place + 1 :] if tensor.level != "ok")
    return Verdict(level, judged[place].name, behind)
