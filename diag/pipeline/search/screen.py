"""Which of very many candidates are worth a measurement of their own: those with the largest cheap scores.

A plan that lowers every layer (FP16) has a thousand candidates. The screen only leaves out and decides
nothing: layers left out stay lowered, and a target missed with every candidate raised is said to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diag.feeds.source import Batch
from diag.pipeline.search.cheap import CheapScores
from diag.progress import Progress
from diag.search.rank import Candidate

MOST_CANDIDATES = 300
_KEPT = 64
"""Candidates kept beside those that destroy values."""
_MOST_BATCHES = 8
"""Batches looked at, evenly over all of them."""


def looked_at(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Several, since one may be the only one where a layer passes the range of its format."""
    return batches[:: -(-len(batches) // _MOST_BATCHES)]


def screened(candidates: Sequence[Candidate], scores: CheapScores, progress: Progress) -> list[Candidate]:
    """Candidates that destroy values on any batch, and those with the largest scores."""
    combined = scores.combined
    destroyed = {c.id for c in candidates if math.isinf(scores.local[c.id])}
    others = sorted((c for c in candidates if c.id not in destroyed), key=lambda c: -combined[c.id])
    kept = destroyed | {c.id for c in others[:_KEPT]}
    progress.note(f"{len(kept)} of {len(candidates)} candidates kept: {len(destroyed)} destroy values")
    return [c for c in candidates if c.id in kept]
