"""Cheap scores of candidates. They order the work and screen; they decide nothing.

How well each of them orders is measured by benchmarks/search_cheap_scores.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from diag.calibration.table import CalibrationTable, TensorRange
from diag.compare.record import Array
from diag.engines.autograd import has_torch
from diag.engines.reference import Trust
from diag.errors import EngineError
from diag.feeds.source import Batch
from diag.model.graph import Model
from diag.pipeline.compare.kinds import tensor_kinds
from diag.pipeline.prepare import Planned
from diag.pipeline.search.first_order import predicted_damages
from diag.pipeline.search.local import LocalErrors, local_errors
from diag.progress import Progress
from diag.search.rank import Candidate
from diag.search.target import Target

Scores = dict[str, float]
"""By candidate id; larger: measure first."""


@dataclass(frozen=True)
class CheapScores:
    """Each score by itself; empty where it cannot be had."""

    local: Scores
    """Noise over signal of the candidate's worst layer by itself; infinite where it destroys values."""
    crest: Scores = field(default_factory=dict)
    """Largest crest factor (largest magnitude over RMS) of the tensors that it quantizes, from the table."""
    gradient: Scores = field(default_factory=dict)
    """Damage at the outputs, predicted to first order."""

    @property
    def combined(self) -> Scores:
        """The prediction where there is one, which no other score improves; else the mean of the ranks.

        Infinite where values are destroyed.
        """
        scores = self.gradient or mean_ranks([s for s in (self.local, self.crest) if s])
        return {i: math.inf if math.isinf(self.local[i]) else score for i, score in scores.items()}


def cheap_scores(
    planned: Planned,
    lowered: Model,
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    trust: Trust,
    target: Target,
    table: CalibrationTable | None,
    progress: Progress,
    limit_s: float = math.inf,
) -> CheapScores:
    """Scores of all candidates; gradients are taken on the first batch.

    When `limit_s` is spent, fewer backward passes have to do; spent before the first one, there are none.
    """
    ends = time.monotonic() + limit_s
    progress.start(f"scoring {len(candidates)} candidates by local error", len(batches))
    keep = frozenset().union(*(c.layers for c in candidates)) if has_torch() else frozenset()
    found = local_errors(planned, lowered, batches, trust, progress, keep)
    local = {c.id: max(found.noise.get(layer, 0.0) for layer in c.layers) for c in candidates}
    gradient: Scores = {}
    try:
        errors = _usable(found, ends)
        kinds = tensor_kinds(planned, trust)
        gradient = predicted_damages(planned, candidates, errors, batches[0], target, kinds, progress, ends)
    except EngineError as error:
        progress.note(f"candidates are ordered by local errors: {error}")
    return CheapScores(local, crest_factors(planned, candidates, table), gradient)


def _usable(found: LocalErrors, ends: float) -> Mapping[str, Array]:
    """The errors to carry to the outputs. Raises EngineError when there are no gradients of them."""
    if not has_torch():
        raise EngineError("gradients, which order better, need PyTorch", 'pip install "trtdiag[torch]"')
    if found.errors is None:
        raise EngineError("those of one batch are too large to keep for gradients")
    if time.monotonic() >= ends:
        raise EngineError("the budget is too short for gradients")
    return found.errors


def crest_factors(
    planned: Planned, candidates: Sequence[Candidate], table: CalibrationTable | None
) -> Scores:
    """Largest crest factor of each candidate's quantized tensors; empty where the table has no energies.

    A uniform quantizer over +-absmax makes noise of (absmax / levels)^2 / 3, so noise over signal grows with
    the square of absmax over RMS.
    """
    by_layer: dict[str, float] = {}
    for operand in planned.operands if table is not None else ():
        found = table.tensors.get(operand.tensor) if table is not None else None
        if operand.weight is None and found is not None and found.evidence is not None:
            by_layer[operand.layer] = max(by_layer.get(operand.layer, 0.0), _crest(found))
    if not by_layer:
        return {}
    return {c.id: max(by_layer.get(layer, 0.0) for layer in c.layers) for c in candidates}


def _crest(found: TensorRange) -> float:
    assert found.evidence is not None
    energy = float(Fraction(found.evidence.energy))
    return found.absmax / math.sqrt(energy / found.elements) if energy > 0 else 0.0


def mean_ranks(scores: Sequence[Scores]) -> Scores:
    """The mean of each candidate's ranks by the scores, all of the same candidates; 1 for the smallest."""
    from scipy.stats import rankdata  # noqa: PLC0415 - a third of the time in which every command starts

    ids = list(scores[0])
    ranks = [rankdata([score[i] for i in ids]) for score in scores]
    return {i: float(sum(r[n] for r in ranks) / len(ranks)) for n, i in enumerate(ids)}
