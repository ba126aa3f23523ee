"""All rules on the quantizers that a model brings, worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diag.lint.bias import check_biases
from diag.lint.hazard import Hazard, worst_first
from diag.lint.placement import check_placement
from diag.lint.quantizers import check_quantizers
from diag.model.graph import Model, TensorInfo
from diag.plan.layers import float_tensors
from diag.typed.brought import Quantizer


def check_qdq(model: Model, quantizers: Sequence[Quantizer], types: Mapping[str, TensorInfo]) -> list[Hazard]:
    """What TensorRT will refuse or cannot use of a Q/DQ model; nothing of one without quantizers."""
    if not quantizers:
        return []
    found = [
        *check_quantizers(model, quantizers, types),
        *check_placement(model, quantizers, float_tensors(model, types)),
        *check_biases(model),
    ]
    return worst_first(found)
