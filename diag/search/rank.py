"""The effect of each candidate alone: lowering only it, and raising only it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from diag.progress import Progress

Damage = Callable[[frozenset[str], int], float]
"""Damage of the outputs when the layers of the set are lowered, on one batch (by number)."""

_SETTLED = 0.98
"""Spearman correlation of the order with the order one batch earlier, from which more data change little."""


@dataclass(frozen=True)
class Candidate:
    """Layers that change precision together; `id` is the first of them in graph order."""

    id: str
    layers: frozenset[str]
    kind: str = "layer"


@dataclass
class Effect:
    """Measured damages of one candidate, one for each batch."""

    candidate: Candidate
    lowered: list[float] = field(default_factory=list)
    """Damage with only this candidate lowered."""
    raised: list[float] = field(default_factory=list)
    """Damage removed from the fully lowered model by raising only this candidate."""

    @property
    def lowered_mean(self) -> float:
        return _mean(self.lowered)

    @property
    def raised_mean(self) -> float:
        return _mean(self.raised)

    @property
    def spread(self) -> float:
        """Standard deviation of `lowered` over the batches, relative to its mean."""
        mean = self.lowered_mean
        return float(np.std(self.lowered) / mean) if mean > 0 and math.isfinite(mean) else 0.0


@dataclass
class Ranking:
    """Effects of all candidates, worst first, and how far they can be trusted."""

    effects: list[Effect]
    total: float
    """Damage with every candidate lowered, mean over the batches."""
    batches: int
    settled: bool
    """False when time or data ran out before the order settled."""
    kendall_tau: float
    """Agreement of the two orders; low: causes mask each other."""
    totals: list[float] = field(default_factory=list)
    """Damage with every candidate lowered, by batch."""


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def rank(
    candidates: Sequence[Candidate],
    damage: Damage,
    batches: Collection[int],
    progress: Progress,
    budget_s: float = math.inf,
    prepare: Callable[[list[frozenset[str]], int], None] | None = None,
) -> Ranking:
    """Measure every candidate batch by batch, until the order is settled, the budget or the data are spent.

    `prepare` is told which sets will be measured on a batch, and may have them measured elsewhere.

    A batch that was begun is finished for every candidate, so that all means are over the same batches; the
    first batch is always finished.
    """
    everything = frozenset().union(*(c.layers for c in candidates))
    effects = [Effect(candidate) for candidate in candidates]
    began, totals, settled = time.monotonic(), [], False
    previous: list[float] | None = None
    progress.start("measuring each layer alone", len(candidates) * len(batches))
    for batch in batches:
        if prepare is not None:
            prepare(_sets(candidates, everything), batch)
        full = damage(everything, batch)
        totals.append(full)
        for effect in effects:
            _measure(effect, damage, everything, full, batch)
            progress.advance()
        scores = _scores(effects).tolist()
        settled = previous is not None and _correlation("spearmanr", previous, scores) >= _SETTLED
        previous = scores
        if settled or time.monotonic() - began > budget_s:
            break
    return ranking_of(effects, totals, settled)


def ranking_of(effects: Sequence[Effect], totals: Sequence[float], settled: bool) -> Ranking:
    """The ranking of measured effects, worst first."""
    order = sorted(zip(_scores(effects), effects, strict=True), key=lambda item: -item[0])
    tau = _correlation("kendalltau", [e.lowered_mean for e in effects], [e.raised_mean for e in effects])
    return Ranking([e for _, e in order], _mean(totals), len(totals), settled, tau, list(totals))


def _sets(candidates: Sequence[Candidate], everything: frozenset[str]) -> list[frozenset[str]]:
    """Every set of lowered layers that one batch is measured with."""
    return [everything, *(s for c in candidates for s in (c.layers, everything - c.layers))]


def _measure(effect: Effect, damage: Damage, everything: frozenset[str], full: float, batch: int) -> None:
    layers = effect.candidate.layers
    effect.lowered.append(damage(layers, batch))
    rest = damage(everything - layers, batch)
    effect.raised.append(full - rest if math.isfinite(full) else (math.inf if math.isfinite(rest) else 0.0))


def _scores(effects: Sequence[Effect]) -> np.ndarray:
    """One number for each candidate: the larger of its two shares. Either alone misses a kind of culprit."""
    lowered = np.nan_to_num([e.lowered_mean for e in effects], posinf=1e30)
    raised = np.nan_to_num([max(e.raised_mean, 0.0) for e in effects], posinf=1e30)
    scores: np.ndarray = np.maximum(lowered / max(lowered.sum(), 1e-300), raised / max(raised.sum(), 1e-300))
    return scores


def _correlation(
    measure: Literal["spearmanr", "kendalltau"], one: Sequence[float], other: Sequence[float]
) -> float:
    """Rank correlation; 1 where neither side has an order, 0 where only one has."""
    ordered = [len(set(side)) > 1 for side in (one, other)]
    if not all(ordered):
        return 0.0 if any(ordered) else 1.0
    from scipy import stats  # noqa: PLC0415 - a third of the time in which every command starts

    value = float(getattr(stats, measure)(one, other).statistic)
    return 1.0 if math.isnan(value) else value
