"""Which of very many candidates are worth a measurement of their own: those with the largest local error.

A plan that lowers every layer (FP16) has a thousand candidates. The screen only leaves out and decides
nothing: layers left out stay lowered, and a target missed with every candidate raised is said to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diag.compare.comparison import Comparison, Observed
from diag.compare.record import Array
from diag.engines.paired import pair
from diag.engines.reference import Trust
from diag.engines.slices import SlicedRun
from diag.model import shapes
from diag.model.graph import Model
from diag.numerics.metrics import sqnr_db
from diag.pipeline.compare.layers import is_destroyed
from diag.pipeline.prepare import Planned
from diag.progress import Progress
from diag.search.rank import Candidate

MOST_CANDIDATES = 300
_KEPT = 64
"""Candidates kept beside those that destroy values."""


def screened(
    planned: Planned,
    lowered: Model,
    candidates: Sequence[Candidate],
    feed: Mapping[str, Array],
    trust: Trust,
    progress: Progress,
) -> list[Candidate]:
    """Candidates that destroy values on one batch, and those with the largest local errors."""
    progress.start(f"screening {len(candidates)} candidates by local error", None)
    local = _local_errors(planned, lowered, feed, trust)
    error = {c.id: min(local.get(layer, float("inf")) for layer in c.layers) for c in candidates}
    worst = sorted(candidates, key=lambda c: error[c.id])
    destroyed = sum(error[c.id] == -float("inf") for c in candidates)
    kept = {c.id for c in worst[: destroyed + _KEPT]}
    progress.note(f"{len(kept)} of {len(candidates)} candidates kept: {destroyed} destroy values")
    return [c for c in candidates if c.id in kept]


def _local_errors(
    planned: Planned, lowered: Model, feed: Mapping[str, Array], trust: Trust
) -> dict[str, float]:
    """Worst local SQNR of each layer in dB, -inf where values are destroyed."""
    model = planned.model
    paired = pair(model, lowered, planned.types)
    dims = shapes.bind(model, {name: array.shape for name, array in feed.items()})
    run = SlicedRun(paired, shapes.infer(model, dims, trust.shape_values))
    comparison = Comparison()
    for observations in run.run(feed):
        for seen in observations:
            comparison.observe(0, Observed(seen.watch.tensor, seen.reference, seen.emulated, seen.local))
    producers = {name: layer.id for layer in model.layers for name in layer.outputs}
    errors: dict[str, float] = {}
    for tensor, record in comparison.local.items():
        value = -float("inf") if is_destroyed(record) else sqnr_db(record.sums)
        layer = producers[tensor]
        errors[layer] = min(errors.get(layer, float("inf")), value)
    return errors
