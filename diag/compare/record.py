"""What is kept of each tensor while batches stream by: sums, and where the worst case was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.numerics.distributions import DecisionSums
from diag.numerics.error import ErrorSums
from diag.numerics.measured import Kind, Measured, TensorKind, measure_tensor
from diag.numerics.metrics import channel_sqnr_db, decision_metrics, error_metrics, sqnr_db

Array = NDArray[Any]


@dataclass(slots=True)
class Record:
    """Error of one tensor over all batches seen."""

    kind: Kind = "values"
    convolution: bool = False
    noise: float = 0.0
    """Largest absolute movement of the reference against itself; margins below twice it are ties."""
    sums: ErrorSums = field(default_factory=ErrorSums)
    decisions: DecisionSums = field(default_factory=DecisionSums)
    worst_batch: int = -1
    worst_sqnr_db: float = math.inf
    worst_index: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: TensorKind) -> Record:
        """Nothing seen yet of a tensor that is judged so."""
        return cls(kind.kind, kind.convolution, kind.noise)

    def update(self, batch: int, reference: Array, candidate: Array) -> None:
        """Take in one batch; the arrays have the same shape and may be of any float type."""
        ref, cand = _float32(reference), _float32(candidate)
        self.take(batch, measure_tensor(ref, cand, self._kind), ref.shape)

    def take(self, batch: int, measured: Measured, shape: tuple[int, ...]) -> None:
        """Take in what was measured of one batch, a tensor of that shape."""
        place = _unravel(measured.sums.max_abs_index, shape)
        self._take(batch, sqnr_db(measured.sums), place, measured.sums, measured.decisions)

    def add(self, later: Record) -> None:
        """Take in what was seen of the same tensor on later batches, as if it had come here."""
        if later.worst_batch >= 0:
            worst = later.worst_batch, later.worst_sqnr_db, later.worst_index
            self._take(*worst, later.sums, later.decisions)

    def _take(
        self, batch: int, value: float, place: tuple[int, ...], sums: ErrorSums, decisions: DecisionSums
    ) -> None:
        """`batch` is the worst of those that the sums are of, `value` its SQNR in dB."""
        if self.worst_batch < 0 or value < self.worst_sqnr_db:
            self.worst_batch, self.worst_sqnr_db, self.worst_index = batch, value, place
        self.sums.add(sums)
        self.decisions.add(decisions)

    def metrics(self) -> dict[str, float]:
        """Metrics by name, see `diag.numerics.table.METRICS`."""
        found = error_metrics(self.sums)
        found["worst_batch_sqnr_db"] = self.worst_sqnr_db
        if self.kind != "values":
            found |= decision_metrics(self.decisions, self._kind.decides)
        return found

    @property
    def _kind(self) -> TensorKind:
        return TensorKind(self.kind, self.convolution, self.noise)

    def worst_channel(self) -> int | None:
        """Channel with the smallest SQNR, None where there is only one."""
        per_channel = channel_sqnr_db(self.sums)
        return int(per_channel.argmin()) if per_channel.size > 1 else None


def _float32(array: Array) -> NDArray[np.float32]:
    return np.ascontiguousarray(array, np.float32)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, shape)) if index >= 0 and shape else ()
