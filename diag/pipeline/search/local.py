"""The error that each layer makes by itself, with the reference's inputs, all layers in one sliced run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from diag.compare.comparison import Comparison, Observed
from diag.compare.record import Array
from diag.engines.paired import pair
from diag.engines.reference import Trust
from diag.engines.slices import Observation, SlicedRun
from diag.feeds.source import Batch
from diag.model import shapes
from diag.model.graph import Model
from diag.numerics.error import MASK_LIKE
from diag.pipeline.compare.layers import is_destroyed
from diag.pipeline.prepare import Planned
from diag.progress import Progress

_MOST_BYTES = 1 << 30
"""Errors kept of one batch; beyond it none are."""


@dataclass
class LocalErrors:
    """What was found of every layer that is lowered."""

    noise: dict[str, float] = field(default_factory=dict)
    """Noise over signal of each layer's worst output and batch; infinite where values are destroyed."""
    errors: dict[str, Array] | None = field(default_factory=dict)
    """Lowered minus reference of the first batch, by output tensor; None when they were too large to keep."""


def local_errors(
    planned: Planned,
    lowered: Model,
    batches: Sequence[Batch],
    trust: Trust,
    progress: Progress,
    keep: Collection[str] = (),
) -> LocalErrors:
    """Run the batches; of the first one, the errors of the layers in `keep` are kept."""
    model = planned.model
    dims = shapes.bind(model, {name: array.shape for name, array in batches[0].items()})
    run = SlicedRun(pair(model, lowered, planned.types), shapes.infer(model, dims, trust.shape_values))
    comparison, found = Comparison(), LocalErrors()
    for number, batch in enumerate(batches):
        for seen in itertools.chain.from_iterable(run.run(batch)):
            comparison.observe(number, Observed(seen.watch.tensor, seen.reference, None, seen.local))
            if number == 0 and seen.watch.layer in keep:
                _keep(found, seen)
        progress.advance()
    for tensor, record in comparison.local.items():
        noise = math.inf if is_destroyed(record) else 10 ** (-record.worst_sqnr_db / 10)
        layer = model.producers[tensor].id
        found.noise[layer] = max(found.noise.get(layer, 0.0), noise)
    return found


def _keep(found: LocalErrors, seen: Observation) -> None:
    if found.errors is None or seen.local is None:
        return
    usable = np.abs(seen.reference) < MASK_LIKE
    found.errors[seen.watch.tensor] = np.where(usable, seen.local - seen.reference, 0).astype(np.float32)
    if sum(error.nbytes for error in found.errors.values()) > _MOST_BYTES:
        found.errors = None
