"""Thresholds on drift: `drifting_tensors<=0`, `sqnr_loss_db<=3`, `TENSOR:saturation<=0.01`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from diag.errors import UsageError
from diag.gate.threshold import Threshold
from diag.report.drift import Drift, DriftTensor
from diag.report.schema import Check


def require_tensors(thresholds: Sequence[Threshold], drift: Drift | None) -> None:
    """Refuse thresholds on tensors that the report does not hold. Raises UsageError."""
    known = {tensor.tensor for tensor in drift.tensors} if drift is not None else set()
    for item in thresholds:
        if item.of_drift and item.output is not None and item.output not in known:
            raise UsageError(
                f"threshold {str(item)!r} names no tensor of the drift report: {item.output!r}",
                "Leave the name out to check the worst tensor.",
            )


def drift_checks(item: Threshold, drift: Drift | None) -> Iterator[Check]:
    """One check: on the tensor that is named, else on the worst. Without drift in the report it fails.

    A tensor with values that are not finite fails every threshold: other figures leave those values out.
    """
    if drift is None:
        yield Check(name=f"{item} (the report holds no drift)", value=None, bound=item.bound, passed=False)
        return
    tensors = [tensor for tensor in drift.tensors if item.output in (None, tensor.tensor)]
    value, name = _worst(item, tensors)
    broken = sum(tensor.nonfinite for tensor in tensors)
    note = f" ({broken} values are not finite)" if broken else ""
    label = f"{name}:{item.condition}{note}" if name else f"{item.condition}{note}"
    yield Check(name=label, value=value, bound=item.bound, passed=not broken and item.holds(value))


def _worst(item: Threshold, tensors: Sequence[DriftTensor]) -> tuple[float | None, str]:
    """The value that is furthest from good, and the tensor that has it."""
    if item.metric == "drifting_tensors":
        return float(sum(tensor.level == "fail" for tensor in tensors)), item.output or ""
    values = [(tensor.figures[item.metric].value, tensor.tensor) for tensor in tensors]
    return max(values, key=lambda v: (math.isnan(v[0]), v[0]), default=(None, ""))
