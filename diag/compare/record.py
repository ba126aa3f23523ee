"""What is kept of each tensor while batches stream by: sums, and where the worst case was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diag.numerics.distributions import DecisionSums, measure_logits, measure_probabilities
from diag.numerics.error import ErrorSums, channel_axis, measure
from diag.numerics.metrics import channel_sqnr_db, decision_metrics, error_metrics, sqnr_db

Kind = Literal["values", "probabilities", "logits"]
Array = NDArray[Any]


@dataclass(slots=True)
class Record:
    """Error of one tensor over all batches seen."""

    kind: Kind = "values"
    convolution: bool = False
    noise: float = 0.0
    """Largest absolute movement of the reference against itself (logits: margins below twice it are ties)."""
    sums: ErrorSums = field(default_factory=ErrorSums)
    decisions: DecisionSums = field(default_factory=DecisionSums)
    worst_batch: int = -1
    worst_sqnr_db: float = math.inf
    worst_index: tuple[int, ...] = ()

    def update(self, batch: int, reference: Array, candidate: Array) -> None:
        """Take in one batch; the arrays have the same shape and may be of any float type."""
        ref, cand = _float32(reference), _float32(candidate)
        sums = measure(ref, cand, channel_axis(ref.ndim, self.convolution))
        value = sqnr_db(sums)
        if self.worst_batch < 0 or value < self.worst_sqnr_db:
            self.worst_batch, self.worst_sqnr_db = batch, value
            self.worst_index = _unravel(sums.max_abs_index, ref.shape)
        self.sums.add(sums)
        if self.kind == "probabilities":
            self.decisions.add(measure_probabilities(ref, cand))
        elif self.kind == "logits":
            self.decisions.add(measure_logits(ref, cand, self.noise))

    def metrics(self) -> dict[str, float]:
        """Metrics by name, see `diag.numerics.table.METRICS`."""
        found = error_metrics(self.sums)
        found["worst_batch_sqnr_db"] = self.worst_sqnr_db
        if self.kind != "values":
            found |= decision_metrics(self.decisions, self.kind == "logits")
        return found

    def worst_channel(self) -> int | None:
        """Channel with the smallest SQNR, None where there is only one."""
        per_channel = channel_sqnr_db(self.sums)
        return int(per_channel.argmin()) if per_channel.size > 1 else None


def _float32(array: Array) -> NDArray[np.float32]:
    return np.ascontiguousarray(array, np.float32)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, shape)) if index >= 0 and shape else ()
