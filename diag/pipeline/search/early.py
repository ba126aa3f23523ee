"""Misses that some of the batches prove: no need to run the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from diag.pipeline.search.setup import Search

_BY_ENERGY = ("sqnr_db", "rel_l2", "cosine")
_BY_ROWS = ("kl", "top1")
"""Metrics whose damage over batches is the mean of the batches' damages, weighted so."""

_NOT_ROUNDING = 1 + 1e-9


def missed_early(search: Search, ids: Collection[str], batches: Sequence[int], slack: float = 1.0) -> bool:
    """Whether some of the batches alone spend more than all of them may, the hardest measured first.

    Damages are not negative, so the mean over all is at least what the measured ones bring to it. Only for
    one bound on one output and an additive metric; never wrong, and silent where it cannot tell.
    """
    output = _judged(search)
    if len(batches) < 2 or output is None:
        return False
    weights = {b: _weight(search, output, b) for b in batches}
    total = max(math.fsum(weights.values()), 1e-300)
    start = {b: _distance(search, (), (b,), 1.0) * weights[b] for b in batches}
    hardest = sorted(batches, key=lambda b: -start[b])
    for count in range(1, len(hardest)):
        seen = sorted(hardest[:count])
        share = math.fsum(weights[b] for b in seen) / total
        if _distance(search, ids, seen, share) > _NOT_ROUNDING / slack:
            return True
    return False


def _judged(search: Search) -> str | None:
    """The one output that the one bound judges; None where there are more, or the metric is not additive."""
    bounds = search.target.bounds
    if len(bounds) != 1 or bounds[0].metric not in (*_BY_ENERGY, *_BY_ROWS):
        return None
    if bounds[0].output is not None:
        return bounds[0].output
    names = search.variants.output_names
    return names[0] if len(names) == 1 else None


def _distance(search: Search, raised: Collection[str], batches: Sequence[int], share: float) -> float:
    """The least distance over all batches, when these are so large a share of them; 1 at the target.

    A cosine c1 over a share w of the energy leaves at most sqrt(w c1^2 + 1 - w) for all: the rest can at best
    point where the first part does, stretched (Cauchy-Schwarz).
    """
    metrics = search.variants.metrics(search.low(raised), batches)
    bound = search.target.bounds[0]
    if bound.metric != "cosine":
        return search.target.distance(metrics) * share
    return search.target.distance(
        {name: m | {"cosine": _best(m["cosine"], share)} for name, m in metrics.items()}
    )


def _best(cosine: float, share: float) -> float:
    return math.sqrt(share * max(cosine, 0.0) ** 2 + 1 - share)


def _weight(search: Search, output: str, batch: int) -> float:
    record = search.variants.outcome(search.low(), batch).records[output]
    by_energy = search.target.bounds[0].metric in _BY_ENERGY
    return float(record.sums.reference_square.sum()) if by_energy else float(record.decisions.rows)
