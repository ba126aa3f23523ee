"""In which order a search with a budget measures its candidates: those that promise the most damage first."""

from __future__ import annotations

import math

from diag.pipeline.prepare import read_scales
from diag.pipeline.search.cheap import CheapScores, Scores, cheap_scores
from diag.pipeline.search.setup import Search
from diag.progress import Progress

_SHARE = 0.1
"""Of the budget, what scores may take."""


def order_scores(search: Search, progress: Progress) -> Scores:
    """Scores by candidate id, larger: measure first. Empty without a budget: then all are measured anyway."""
    if math.isinf(search.settings.budget_s):
        return {}
    if search.scores is not None:
        return search.scores.combined
    return score(search, progress, _SHARE * search.settings.budget_s).combined


def score(search: Search, progress: Progress, limit_s: float = math.inf) -> CheapScores:
    """Every cheap score of the search's candidates, on its first batch."""
    planned = search.planned
    table = read_scales(planned, search.table or None)
    return cheap_scores(
        planned,
        planned.apply(table).model,
        search.candidates,
        [dict(search.variants.batch(search.chosen[0]))],
        search.trust,
        search.target,
        table,
        progress,
        limit_s,
    )
