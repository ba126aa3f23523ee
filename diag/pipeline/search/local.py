"""The error that each layer makes by itself, with the reference's inputs, all layers in one sliced run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from diag.compare.comparison import Comparison, Observed
from diag.compare.record import Array
from diag.engines.paired import pair
from diag.engines.slices import Observation, SlicedRun
from diag.model import shapes
from diag.model.graph import Model
from diag.numerics.error import MASK_LIKE
from diag.numerics.metrics import sqnr_db
from diag.pipeline.compare.layers import is_destroyed
from diag.pipeline.prepare import Planned

_MOST_BYTES = 1 << 30
"""Errors kept of one batch; beyond it none are."""


@dataclass
class LocalErrors:
    """Of one batch."""

    noise: dict[str, float] = field(default_factory=dict)
    """Noise over signal of each layer's worst output; infinite where values are destroyed."""
    errors: dict[str, Array] | None = field(default_factory=dict)
    """Lowered minus reference, by output tensor; None when they were too large to keep."""


def local_errors(
    planned: Planned,
    lowered: Model,
    feed: Mapping[str, Array],
    shape_values: Mapping[str, Array],
    keep: Collection[str] = (),
) -> LocalErrors:
    """Run one batch; the errors of the layers in `keep` are kept.

    `shape_values` are what shape arithmetic comes to where that is known (slices are cut more evenly then).
    """
    model = planned.model
    dims = shapes.bind(model, {name: array.shape for name, array in feed.items()})
    run = SlicedRun(pair(model, lowered, planned.types), shapes.infer(model, dims, shape_values))
    comparison, found = Comparison(), LocalErrors()
    for observations in run.run(feed):
        for seen in observations:
            if seen.local is not None:
                tensor = seen.watch.tensor
                comparison.observe(0, Observed(tensor, seen.reference, None, seen.local))
                if seen.watch.layer in keep:
                    _keep(found, seen)
    for tensor, record in comparison.local.items():
        noise = math.inf if is_destroyed(record) else 10 ** (-sqnr_db(record.sums) / 10)
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
