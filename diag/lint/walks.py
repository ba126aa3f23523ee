"""Walks along the graph that several rules share: to a mask's Softmax, to the constant before a division."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.model.graph import Layer, Model
from diag.numerics.formats import Format, round_to

MASKS = frozenset({"Add", "Sub", "Mul", "Where", "Min", "Max", "Expand", "Reshape", "Unsqueeze", "Cast"})
"""Operators between a mask's constant and the Softmax that it is for."""

SHIFTS = frozenset({"Add", "Sub", "Max", "Min", "Clip"})
"""Operators whose small constant keeps a divisor or a logarithm's argument away from zero."""

SQUARES = frozenset({"Pow", "Mul", "ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare"})
"""Operators that square, or sum squares, inside a norm."""

Values = NDArray[Any]


def feeds_softmax(model: Model, layer: Layer, reach: int) -> bool:
    """Whether a Softmax stands at most `reach` layers behind, with nothing but mask arithmetic between."""
    near = [layer]
    for _ in range(reach):
        near = [r for x in near for name in x.outputs for r in model.consumers.get(name, ())]
        if any(x.op_type == "Softmax" for x in near):
            return True
        near = [x for x in near if x.op_type in MASKS]
    return False


def constants_before(
    model: Model, layer: Layer, through: Collection[str], reach: int, inputs: Sequence[str] | None = None
) -> Iterator[tuple[Sequence[Layer], list[Values]]]:
    """Single-valued float constants that the layer and those before it read, and the path from there.

    Goes back through operators of `through`, at first along `inputs` of the layer (all, if None).
    """
    paths: list[tuple[Layer, ...]] = [(layer,)]
    for step in range(reach):
        for path in paths:
            values = [model.constant(name) for name in path[0].inputs if name]
            yield (
                path,
                [np.asarray(v) for v in values if v is not None and v.dtype.kind == "f" and v.size == 1],
            )
        heads = [
            (model.producers[name], *path)
            for path in paths
            for name in (inputs if inputs is not None and not step else path[0].inputs)
            if name in model.producers and name in model.value_dependent
        ]
        paths = [path for path in heads if path[0].op_type in through]


def becomes_zero(value: Values, fmt: Format) -> bool:
    """Whether a constant that is not 0 becomes 0."""
    exact = value.astype(np.float32).reshape(-1)
    return bool(((exact != 0) & (round_to(exact, fmt) == 0)).any())


def becomes_one(value: Values, fmt: Format) -> bool:
    """Whether a constant that is not 1 becomes 1."""
    exact = value.astype(np.float32).reshape(-1)
    return bool(((exact != 1) & (round_to(exact, fmt) == 1)).any())


def overflow_kind(role: str, op_type: str) -> str:
    """Name of an overflow, from what the layer is for."""
    if role == "norm" and op_type in SQUARES:
        return "norm-square-overflow"
    if role == "attn_mask":
        return "mask-constant"
    if op_type in ("Exp", "Log", "Softplus"):
        return "exp-log-domain"
    if op_type.startswith("Reduce") or op_type == "GlobalAveragePool":
        return "reduction-accumulation"
    return "activation-overflow"
