"""A metric of the user's own: `--metric FILE.py:function`. Runs the user's code because the user named it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diag.errors import DataError, UsageError
from diag.feeds.source import Array
from diag.feeds.user_code import blamed, load_function
from diag.numerics.table import METRICS

REFERENCE = "reference"
"""Beside the metric's value: what the same batches give in FP32."""


@dataclass(frozen=True)
class UserMetric:
    """`function(outputs, labels) -> number`, called once for each batch.

    `outputs` maps output names to arrays; `labels` holds the arrays of the batch that are no inputs.
    """

    name: str
    file: Path
    function: Callable[..., Any]
    sha256: str
    """Identity of the file and of the function in it."""

    def value(self, outputs: Mapping[str, Array], labels: Mapping[str, Array]) -> float:
        """Raises DataError, naming the line, when the function raises or gives no finite number."""
        with blamed(self.file):
            value = self.function(dict(outputs), dict(labels))
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.name}() in {str(self.file)!r} gave a {type(value).__name__}, not a number",
                "Return one float for each batch.",
            ) from error
        if not math.isfinite(number):
            raise DataError(
                f"{self.name}() in {str(self.file)!r} gave {number}", "It must be finite for every batch."
            )
        return number


def open_metric(spec: str) -> UserMetric:
    """The metric that `FILE.py:function` names. Raises UsageError and DataError."""
    name, colon, function = spec.rpartition(":")
    file = Path(name)
    if not colon or not name.endswith(".py") or not function.isidentifier():
        raise UsageError(f"{spec!r} names no metric", "Write FILE.py:function.")
    if not file.is_file():
        raise UsageError(f"{name!r} does not exist", "Write FILE.py:function.")
    if function in METRICS:
        raise UsageError(f"{function!r} is a metric of trtdiag's own", "Give the function another name.")
    hint = "Write one that takes outputs and labels (dicts of arrays) and returns a number."
    found = load_function(file, function, hint)
    identity = hashlib.sha256(f"{function}\n".encode() + file.read_bytes())
    return UserMetric(function, file, found, identity.hexdigest())


@dataclass(frozen=True)
class OwnSums:
    """Sums over batches, weighted by their samples (the first dimension of the first output)."""

    name: str
    value: float
    reference: float
    """What the same batches give in FP32."""
    samples: int

    def __add__(self, other: OwnSums) -> OwnSums:
        return OwnSums(
            self.name,
            self.value + other.value,
            self.reference + other.reference,
            self.samples + other.samples,
        )

    def metrics(self) -> dict[str, float]:
        """The metric's mean, and that of the reference."""
        samples = max(self.samples, 1)
        return {self.name: self.value / samples, REFERENCE: self.reference / samples}


def measure_own(
    metric: UserMetric,
    reference: Mapping[str, Array],
    outputs: Mapping[str, Array],
    labels: Mapping[str, Array],
) -> OwnSums:
    """The metric on one batch. Raises DataError."""
    first = next(iter(outputs.values()))
    samples = first.shape[0] if first.ndim else 1
    value, best = (samples * metric.value(arrays, labels) for arrays in (outputs, reference))
    return OwnSums(metric.name, value, best, samples)
