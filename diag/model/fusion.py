"""What engines compute in one kernel, as far as the graph shows it."""

from __future__ import annotations

from collections.abc import Collection

from diag.model.graph import Layer, Model

_BETWEEN = frozenset({"Add", "BatchNormalization", "Identity"})


def fused_source(model: Model, name: str, op_types: Collection[str]) -> Layer | None:
    """The layer of one of `op_types` whose kernel makes the tensor; None when there is none.

    Between the two stand only a bias and a BatchNormalization, and nothing else reads what they make.
    """
    while (layer := model.producers.get(name)) is not None and not layer.domain:
        if name in model.outputs or len(model.consumers.get(name, ())) != 1:
            return None
        if layer.op_type in op_types:
            return layer
        activations = [read for read in layer.inputs if read in model.value_dependent]
        if layer.op_type not in _BETWEEN or len(activations) != 1:
            return None
        name = activations[0]
    return None
