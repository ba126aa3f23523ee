"""Runs the FP32 model on a batch and counts the tensors that calibration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.calibration.measurement import Measurement
from diag.calibration.samples import Split, split
from diag.calibration.sums import TensorSums, summarize
from diag.engines.watch import Watcher
from diag.model.graph import Model

Array = NDArray[Any]
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


@dataclass(frozen=True)
class Observed:
    """The measured tensors of one batch, and its samples."""

    values: Mapping[str, Array]
    split: Split


class Meter:
    """The model with the measured tensors as its outputs."""

    def __init__(self, model: Model, tensors: Sequence[str]) -> None:
        """Raises EngineError when ONNX Runtime cannot run the model."""
        self._axes = {name: channel_axis_of(model, name) for name in tensors}
        self._watcher = Watcher(model, tensors)

    def run(self, batch: Mapping[str, Array]) -> Observed:
        """Compute the tensors of one batch."""
        return Observed(self._watcher.run(batch), split(batch))

    def count(self, seen: Observed) -> Measurement:
        """Count them. Different batches may be counted in different threads."""
        tensors: dict[str, TensorSums] = {}
        for name, array in seen.values.items():
            tensors[name] = summarize(np.asarray(array, np.float32), seen.split, self._axes[name])
        first = seen.split.first
        return Measurement(
            tensors,
            batches=1,
            half_samples=(first, seen.split.samples - first),
            identity=seen.split.key,
            keys=(seen.split.key,),
        )


def channel_axis_of(model: Model, tensor: str) -> int:
    """Axis of the channels of a tensor for the first layer that reads it: 1 for convolutions, else -1."""
    readers = model.consumers.get(tensor, ())
    return 1 if readers and readers[0].op_type in CONVOLUTIONS else -1
