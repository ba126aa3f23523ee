"""Min-max calibration: the range that the data really take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.calibration.table import TensorRange
from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.errors import TableError
from diag.model.graph import Model
from diag.progress import Progress

Batch = Mapping[str, NDArray[Any]]


def measure_ranges(
    model: Model, tensors: Sequence[str], batches: Iterable[Batch], progress: Progress
) -> dict[str, TensorRange]:
    """Smallest and largest value of each tensor over all batches, in the FP32 reference.

    Raises TableError when a tensor is not finite (its range would be meaningless).
    """
    computed = [name for name in tensors if name not in model.inputs]
    ranges: dict[str, TensorRange] = {}
    if not tensors:
        return ranges
    session = Session(with_outputs(model.proto, computed or list(model.outputs)), model.weights)
    for number, batch in enumerate(batches):
        values = session.run(batch)
        for name in tensors:
            array = values[name] if name in values else batch[name]
            ranges[name] = _joined(ranges.get(name), array, name, number)
        progress.advance()
    return ranges


def _joined(known: TensorRange | None, array: NDArray[Any], name: str, batch: int) -> TensorRange:
    if array.size == 0:
        return known or TensorRange(absmax=0, minimum=0, maximum=0, elements=0)
    low, high = float(np.min(array)), float(np.max(array))
    if not (np.isfinite(low) and np.isfinite(high)):
        raise TableError(
            f"tensor {name!r} is not finite in batch {batch} of the calibration data",
            "Check the FP32 model on that batch, or leave the batch out.",
        )
    if known is not None:
        low, high = min(low, known.minimum), max(high, known.maximum)
    elements = array.size + (known.elements if known else 0)
    return TensorRange(absmax=max(-low, high, 0.0), minimum=low, maximum=high, elements=elements)
