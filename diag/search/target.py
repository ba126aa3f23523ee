"""What a search must reach, and how far from it a measurement is. Pure functions of output metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

OutputMetrics = Mapping[str, Mapping[str, float]]
"""Metrics by output name."""


class Bound(Protocol):
    """A threshold on one metric (see `diag.gate.threshold.Threshold`)."""

    @property
    def metric(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def bound(self) -> float: ...
    @property
    def output(self) -> str | None: ...
    def holds(self, value: float | None) -> bool: ...


@dataclass(frozen=True)
class Target:
    """All of the bounds, each on the output that it names or on every output that has the metric."""

    bounds: Sequence[Bound]

    def met(self, outputs: OutputMetrics) -> bool:
        """Whether every bound holds; a bound that no output can answer does not."""
        return all(_holds(bound, outputs) for bound in self.bounds)

    def damage(self, outputs: OutputMetrics) -> float:
        """Distance from the reference, in units of what the target allows (1 at the target).

        The worst bound decides. Damages of small independent errors add up: SQNR counts as a noise-to-signal
        ratio, cosine as 1 - cosine, KL as itself; agreement of decisions is judged by KL, which is finer. A
        user's own metric counts by its distance from what the reference gives (`reference` beside it).
        """
        return max((_damage(bound, outputs) for bound in self.bounds), default=0.0)

    def distance(self, outputs: OutputMetrics) -> float:
        """Like `damage`, but exactly 1 where the target begins to hold, whatever the metric."""
        return max((_damage(bound, outputs, decisions=True) for bound in self.bounds), default=0.0)

    def worst_bound(self, outputs: OutputMetrics) -> Bound:
        """The bound that these outputs are farthest from, or nearest to missing."""
        return max(self.bounds, key=lambda bound: _damage(bound, outputs, decisions=True))

    def __str__(self) -> str:
        return ", ".join(str(bound) for bound in self.bounds)


def answer(bound: Bound, outputs: OutputMetrics) -> float:
    """The bound's metric at the output where it is worst; NaN where no output has it."""
    values = [metrics[bound.metric] for metrics in _answers(bound, outputs)]
    worst = min if bound.op.startswith(">") else max
    return worst(values, default=math.nan)


def _answers(bound: Bound, outputs: OutputMetrics) -> list[Mapping[str, float]]:
    chosen = [m for name, m in outputs.items() if bound.output in (None, name)]
    return [metrics for metrics in chosen if bound.metric in metrics]


def _holds(bound: Bound, outputs: OutputMetrics) -> bool:
    answers = _answers(bound, outputs)
    return bool(answers) and all(bound.holds(m[bound.metric]) and m.get("nonfinite", 0) == 0 for m in answers)


def _damage(bound: Bound, outputs: OutputMetrics, decisions: bool = False) -> float:
    return max(
        (_one_damage(bound, metrics, decisions) for metrics in _answers(bound, outputs)), default=math.inf
    )


def _one_damage(bound: Bound, metrics: Mapping[str, float], decisions: bool) -> float:
    if "reference" in metrics:
        return _relative(metrics["reference"] - metrics[bound.metric], metrics["reference"] - bound.bound)
    if metrics.get("nonfinite", 0) > 0:
        return math.inf
    if bound.metric == "sqnr_db":
        return 10 ** ((bound.bound - metrics["sqnr_db"]) / 10)
    if bound.metric == "cosine":
        return (1 - metrics["cosine"]) / max(1 - bound.bound, 1e-12)
    if bound.metric == "top1" and "kl" in metrics and not decisions:
        return metrics["kl"]
    if bound.metric == "top1":
        return (1 - metrics["top1"]) / max(1 - bound.bound, 1e-12)
    if bound.metric == "rel_l2":
        return (metrics["rel_l2"] / max(bound.bound, 1e-12)) ** 2
    return abs(metrics[bound.metric]) / max(abs(bound.bound), 1e-12)


def _relative(lost: float, allowed: float) -> float:
    """Share of the allowed loss that is lost; a metric that moved the other way has lost nothing."""
    if allowed == 0:
        return 0.0 if lost == 0 else math.inf
    return max(lost / allowed, 0.0)
