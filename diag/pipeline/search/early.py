"""Misses that one batch proves: no need to run the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diag.pipeline.search.setup import Search

_ADDITIVE = ("sqnr_db", "kl")
"""Metrics whose damage over batches is the mean of the batches' damages, by energy or by elements."""


def missed_by_one(search: Search, ids: frozenset[str], batches: Sequence[int], slack: float = 1.0) -> bool:
    """Whether the hardest of the batches alone spends more than all of them may.

    Damages are not negative, so the mean is at least the hardest batch's share of it. Its own damage is a
    trial that starts from a trace. Only for one bound on an additive metric of a model with one output.
    """
    if len(batches) < 2 or not _applies(search):
        return False
    weights = {b: _weight(search, b) for b in batches}
    total = max(sum(weights.values()), 1e-300)

    def spent(raised: frozenset[str], batch: int) -> float:
        """What one batch takes of the damage that all of them may have."""
        damage = search.target.distance(search.variants.metrics(search.low(raised), (batch,)))
        return damage * weights[batch] / total

    hardest = max(batches, key=lambda b: spent(frozenset(), b))
    return spent(ids, hardest) > 1 / slack


def _applies(search: Search) -> bool:
    bounds = search.target.bounds
    return len(bounds) == 1 and bounds[0].metric in _ADDITIVE and len(search.variants.output_names) == 1


def _weight(search: Search, batch: int) -> float:
    """Energy of the reference for SQNR, else its elements."""
    metrics = next(iter(search.variants.metrics(search.low(), (batch,)).values()))
    energy = _energy(metrics) if search.target.bounds[0].metric == "sqnr_db" else 1.0
    return energy * metrics["elements"]


def _energy(metrics: Mapping[str, float]) -> float:
    return metrics["reference_rms"] ** 2
