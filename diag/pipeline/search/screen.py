"""Which of very many candidates are worth a measurement of their own: those with the largest local error.

A plan that lowers every layer (FP16) has a thousand candidates. The screen only leaves out and decides
nothing: layers left out stay lowered, and a target missed with every candidate raised is said to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from diag.compare.comparison import Comparison, Observed
from diag.engines.paired import pair
from diag.engines.reference import Trust
from diag.engines.slices import SlicedRun
from diag.feeds.source import Batch
from diag.model import shapes
from diag.model.graph import Model
from diag.pipeline.compare.layers import is_destroyed
from diag.pipeline.prepare import Planned
from diag.progress import Progress
from diag.search.rank import Candidate

MOST_CANDIDATES = 300
_KEPT = 64
"""Candidates kept beside those that destroy values."""
_MOST_BATCHES = 8
"""Batches looked at, evenly over all of them."""


def screened(
    planned: Planned,
    lowered: Model,
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    trust: Trust,
    progress: Progress,
) -> list[Candidate]:
    """Candidates that destroy values on any batch, and those with the largest local errors.

    One batch may be the only one where a layer passes the range of its format, so several are looked at.
    """
    looked_at = batches[:: -(-len(batches) // _MOST_BATCHES)]
    progress.start(f"screening {len(candidates)} candidates by local error", len(looked_at))
    local = _local_errors(planned, lowered, looked_at, trust, progress)
    error = {c.id: min(local.get(layer, float("inf")) for layer in c.layers) for c in candidates}
    worst = sorted(candidates, key=lambda c: error[c.id])
    destroyed = sum(error[c.id] == -float("inf") for c in candidates)
    kept = {c.id for c in worst[: destroyed + _KEPT]}
    progress.note(f"{len(kept)} of {len(candidates)} candidates kept: {destroyed} destroy values")
    return [c for c in candidates if c.id in kept]


def _local_errors(
    planned: Planned, lowered: Model, batches: Sequence[Batch], trust: Trust, progress: Progress
) -> dict[str, float]:
    """Worst local SQNR of each layer in dB over all batches, -inf where values are destroyed."""
    model = planned.model
    paired = pair(model, lowered, planned.types)
    dims = shapes.bind(model, {name: array.shape for name, array in batches[0].items()})
    run = SlicedRun(paired, shapes.infer(model, dims, trust.shape_values))
    comparison = Comparison()
    for number, batch in enumerate(batches):
        for observations in run.run(batch):
            for seen in observations:
                comparison.observe(number, Observed(seen.watch.tensor, seen.reference, None, seen.local))
        progress.advance()
    producers = {name: layer.id for layer in model.layers for name in layer.outputs}
    errors: dict[str, float] = {}
    for tensor, record in comparison.local.items():
        value = -float("inf") if is_destroyed(record) else record.worst_sqnr_db
        layer = producers[tensor]
        errors[layer] = min(errors.get(layer, float("inf")), value)
    return errors
