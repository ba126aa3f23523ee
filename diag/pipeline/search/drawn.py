"""Layers of a group that the user drew, and that the target could do without."""

from __future__ import annotations

from collections.abc import Sequence

from diag.pipeline.search.setup import Search
from diag.search.rank import Candidate


def spare_layers(
    search: Search, pins: Sequence[str], group: Candidate, batches: Sequence[int], most_trials: int
) -> list[str] | None:
    """Layers of a pinned group that may be lowered, all at once, while the target holds; in graph order.

    Tried one after the other on these batches, the last first. None where that would take more than
    `most_trials` trials of one batch.
    """
    order = sorted(group.layers, key=lambda name: search.planned.model.layer_by_id[name].index)
    if len(order) * len(batches) > most_trials:
        return None
    low = search.low(pins)
    for layer in reversed(order):
        if len(group.layers - low) > 1 and search.target.met(search.variants.metrics(low | {layer}, batches)):
            low |= {layer}
    return [layer for layer in order if layer in low]
