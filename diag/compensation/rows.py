"""Rows of activations that the searches look at: some of each of a few batches, a few tensors at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diag.calibration.meter import Meter
from diag.calibration.samples import evenly
from diag.compensation.sites import Site
from diag.model.graph import Model

Float = NDArray[np.float32]
Batch = Mapping[str, NDArray[np.generic]]


def groups_of_sites(sites: Sequence[Site], rows: int, most_bytes: int) -> Iterator[tuple[Site, ...]]:
    """Consecutive sites whose rows fit into `most_bytes` together."""
    group: list[Site] = []
    held = 0
    for site in sites:
        size = 4 * rows * site.channels
        if group and held + size > most_bytes:
            yield tuple(group)
            group, held = [], 0
        group.append(site)
        held += size
    if group:
        yield tuple(group)


def rows_of(model: Model, tensors: Sequence[str], batches: Sequence[Batch], rows: int) -> dict[str, Float]:
    """Up to `rows` vectors along the last axis of each tensor, evenly from every batch."""
    meter = Meter(model, tensors)
    found: dict[str, list[Float]] = {name: [] for name in tensors}
    for batch in batches:
        for name, array in meter.run(batch).values.items():
            found[name].append(evenly(np.asarray(array, np.float32), max(1, rows // len(batches))))
    return {name: np.concatenate(parts) for name, parts in found.items()}
