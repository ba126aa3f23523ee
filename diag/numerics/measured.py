"""What is measured of one tensor of one batch, whoever does it: sums of error and of decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from diag.numerics.distributions import DecisionSums, measure_classes, measure_logits, measure_probabilities
from diag.numerics.error import ErrorSums, Float, channel_axis, measure

Kind = Literal["values", "probabilities", "classes", "logits"]
"""`probabilities`: a softmax inside the model. `classes`: one that the model gives out, a decision."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """How a tensor is kind."""

    kind: Kind = "values"
    convolution: bool = False
    noise: float = 0.0
    """Largest absolute movement of the reference against itself; margins below twice it are ties."""

    @property
    def decides(self) -> bool:
        """Whether the largest element of a row is a decision."""
        return self.kind in ("classes", "logits")

    def axis(self, rank: int) -> int | None:
        """The axis that holds channels in a tensor of that rank; None where there is only one."""
        return channel_axis(rank, self.convolution)


@dataclass(frozen=True, slots=True)
class Measured:
    """Additive facts about one tensor of one batch."""

    sums: ErrorSums
    decisions: DecisionSums = field(default_factory=DecisionSums)


def measure_tensor(reference: Float, candidate: Float, kind: TensorKind) -> Measured:
    """Both arrays: float32 of one shape, on the host."""
    sums = measure(reference, candidate, kind.axis(reference.ndim))
    if kind.kind == "probabilities":
        return Measured(sums, measure_probabilities(reference, candidate))
    if kind.kind == "classes":
        return Measured(sums, measure_classes(reference, candidate, kind.noise))
    if kind.kind == "logits":
        return Measured(sums, measure_logits(reference, candidate, kind.noise))
    return Measured(sums)
