"""The smallest and largest value of every float tensor of the FP32 reference, infinities left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.engines.watch import Watcher
from diag.lint.lowered import Extremes
from diag.model.graph import Model
from diag.progress import Progress

Batch = Mapping[str, NDArray[Any]]


def measure_extremes(
    model: Model, tensors: Sequence[str], batches: Iterable[Batch], magnitude: float, progress: Progress
) -> dict[str, Extremes]:
    """Extremes of each tensor over all batches; elements beyond `magnitude` count as infinite.

    Holds the tensors of one batch at a time. Raises EngineError when ONNX Runtime cannot run the model.
    """
    watcher = Watcher(model, tensors)
    found: dict[str, Extremes] = {}
    for batch in batches:
        for name, array in watcher.run(batch).items():
            known = found.get(name)
            found[name] = _of(array, magnitude) if known is None else _joined(known, _of(array, magnitude))
        progress.advance()
    return found


def _of(array: NDArray[Any], magnitude: float) -> Extremes:
    finite = array[np.isfinite(array)]
    nan = int(np.count_nonzero(np.isnan(array)))
    lowest = float(finite.min(initial=0.0))
    counted = finite[np.abs(finite) <= magnitude] if finite.size else finite
    if not counted.size:
        return Extremes(0.0, 0.0, lowest, nan)
    energy = float(np.square(counted, dtype=np.float64).sum())
    return Extremes(float(counted.min()), float(counted.max()), lowest, nan, energy, counted.size)


def _joined(first: Extremes, second: Extremes) -> Extremes:
    return Extremes(
        min(first.minimum, second.minimum),
        max(first.maximum, second.maximum),
        min(first.lowest, second.lowest),
        first.nan + second.nan,
        first.energy + second.energy,
        first.elements + second.elements,
    )
