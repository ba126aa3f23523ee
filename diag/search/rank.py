"""The effect of each candidate alone: lowering only it, and raising only it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from diag.progress import Progress

Damage = Callable[[frozenset[str], int], float]
"""Damage of the outputs when the layers of the set are lowered, on one batch (by number)."""

_SETTLED = 0.02
"""Largest share of the damage by which the order of one batch earlier may fall behind."""

_MASKED = 0.5
"""Share of the gains that the order by damage alone leaves behind, from which the gains count as much. One
batch leaves up to 0.33 (MiniLM) or 0.48 (SmolLM2) behind by chance; a pair that hurts only together, all."""

_MOST_OF_IT = 0.8
_FEWEST = 4


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
    """Damage with only this candidate lowered; empty where the budget was spent before."""
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
        """Standard deviation of `lowered` over the batches, relative to its mean; NaN with fewer than two."""
        if len(self.lowered) < 2 or not math.isfinite(self.lowered_mean):
            return math.nan
        return float(np.std(self.lowered, ddof=1) / self.lowered_mean) if self.lowered_mean > 0 else 0.0


@dataclass
class Ranking:
    """Effects of all candidates, worst first, and how far they can be trusted."""

    effects: list[Effect]
    total: float
    """Damage with every candidate lowered, mean over the batches."""
    batches: int
    """Batches on which the candidates that matter were measured; the others were on the first one."""
    settled: bool
    """False when time or data ran out before the order of what matters settled."""
    kendall_tau: float
    """Agreement of the two orders; low: causes mask each other."""
    totals: list[float] = field(default_factory=list)
    """Damage with every candidate lowered, by batch."""

    @property
    def unmeasured(self) -> int:
        """Candidates that the budget left out; they come last."""
        return sum(not effect.lowered for effect in self.effects)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def rank(
    candidates: Sequence[Candidate],
    damage: Damage,
    batches: Collection[int],
    progress: Progress,
    budget_s: float = math.inf,
    prepare: Callable[[list[frozenset[str]], int], None] | None = None,
    prior: Mapping[str, float] | None = None,
) -> Ranking:
    """Measure every candidate on one batch, and those that matter on more, until their order is settled.

    What matters: twice the candidates that an additive model must raise to bring the damage to 1, by either
    order. Their order is settled when the one of a batch earlier would have done as well (Sequential Halving
    is the idea: Karnin, Koren and Somekh, ICML 2013; here the rounds end by what is lost, not by number).
    `prior` (larger: first) orders the work within a batch; a spent budget ends it, also within the first
    batch, and leaves the rest unmeasured. `prepare` is told which sets will be measured on a batch, and may
    have them measured elsewhere.
    """
    everything = frozenset().union(*(c.layers for c in candidates))
    effects = [Effect(c) for c in sorted(candidates, key=lambda c: -(prior or {}).get(c.id, 0.0))]
    race = _Race(damage, everything, time.monotonic() + budget_s, prepare, progress)
    settled = False
    progress.start("measuring each layer alone", len(candidates))
    for batch in batches:
        runners = effects if not race.totals else _what_matters(effects, race.totals)
        before = scores(effects) if race.totals else None
        race.run(runners, batch)
        settled = before is not None and _loss(before, scores(effects)) <= _SETTLED
        if settled or race.is_over():
            break
        progress.start("measuring again the layers that matter", None)
    return ranking_of(effects, race.totals, settled)


@dataclass
class _Race:
    """Measures candidates batch by batch while time is left."""

    damage: Damage
    everything: frozenset[str]
    ends: float
    prepare: Callable[[list[frozenset[str]], int], None] | None
    progress: Progress
    totals: list[float] = field(default_factory=list)

    def is_over(self) -> bool:
        return time.monotonic() > self.ends

    def run(self, effects: Sequence[Effect], batch: int) -> None:
        """A later batch that was begun is finished, so that what matters is compared on the same data."""
        if self.prepare is not None:
            self.prepare(_sets([e.candidate for e in effects], self.everything), batch)
        first = not self.totals
        self.totals.append(self.damage(self.everything, batch))
        for effect in effects:
            _measure(effect, self.damage, self.everything, self.totals[-1], batch)
            self.progress.advance()
            if first and self.is_over():
                return


def _what_matters(effects: Sequence[Effect], totals: Sequence[float]) -> list[Effect]:
    """The first of both orders: twice as many as must be raised by an additive model, and two."""
    measured = [effect for effect in effects if effect.lowered]
    damages = np.sort(_clean([e.lowered_mean for e in measured]))[::-1]
    total = _mean(totals)
    shares = np.cumsum(damages) / max(damages.sum(), 1e-300)
    many = int(np.searchsorted(shares, _MOST_OF_IT)) + 1
    if math.isfinite(total) and total > 1:
        many = min(many, 2 * (int(np.searchsorted(shares, 1 - 1 / total)) + 1) + 2)
    many = max(many, _FEWEST)
    by_score = scores(measured)
    orders = (np.argsort(-by_score), np.argsort([-e.lowered_mean for e in measured]))
    chosen = {int(i) for order in orders for i in order[:many]}
    return [effect for index, effect in enumerate(measured) if index in chosen]


def ranking_of(effects: Sequence[Effect], totals: Sequence[float], settled: bool) -> Ranking:
    """The ranking of measured effects, worst first; those without a measurement last, as they come."""
    measured = [e for e in effects if e.lowered]
    order = sorted(zip(scores(measured), measured, strict=True), key=lambda item: -item[0])
    tau = _kendall([e.lowered_mean for e in measured], [e.raised_mean for e in measured])
    ranked = [*(e for _, e in order), *(e for e in effects if not e.lowered)]
    return Ranking(ranked, _mean(totals), len(totals), settled, tau, list(totals))


def _sets(candidates: Sequence[Candidate], everything: frozenset[str]) -> list[frozenset[str]]:
    """Every set of lowered layers that one batch is measured with."""
    return [everything, *(s for c in candidates for s in (c.layers, everything - c.layers))]


def _measure(effect: Effect, damage: Damage, everything: frozenset[str], full: float, batch: int) -> None:
    layers = effect.candidate.layers
    effect.lowered.append(damage(layers, batch))
    rest = damage(everything - layers, batch)
    effect.raised.append(full - rest if math.isfinite(full) else (math.inf if math.isfinite(rest) else 0.0))


def scores(effects: Sequence[Effect]) -> np.ndarray:
    """One number for each candidate: its share of the damages.

    Gains of raising alone vary far more, since they are small differences of large damages. They count as
    much where the order by damage would leave much of them behind: causes that hurt only together.
    """
    lowered = _shares([e.lowered_mean for e in effects])
    raised = _shares([e.raised_mean for e in effects])
    return np.maximum(lowered, raised) if _loss(lowered, raised) > _MASKED else lowered


def _shares(values: Sequence[float]) -> np.ndarray:
    clean = _clean(values)
    shares: np.ndarray = clean / max(clean.sum(), 1e-300)
    return shares


def _clean(values: Sequence[float]) -> np.ndarray:
    """Not negative, and infinite ones as a number that still adds up."""
    clean: np.ndarray = np.clip(np.nan_to_num(values, posinf=1e30), 0.0, None)
    return clean


def _loss(order_by: np.ndarray, worth: np.ndarray) -> float:
    """Largest share of `worth` that the first k by `order_by` have less than the best k, over all k."""
    if worth.sum() <= 0:
        return 0.0
    taken = worth[np.argsort(-order_by, kind="stable")]
    return float(np.max(np.cumsum(np.sort(worth)[::-1]) - np.cumsum(taken)) / worth.sum())


def _kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's rank correlation; 1 where neither side has an order, 0 where only one has."""
    ordered = [len(set(side)) > 1 for side in (one, other)]
    if not all(ordered):
        return 0.0 if any(ordered) else 1.0
    from scipy import stats  # noqa: PLC0415 - a third of the time in which every command starts

    value = float(stats.kendalltau(one, other).statistic)
    return 1.0 if math.isnan(value) else value
