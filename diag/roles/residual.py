"""Finds residual connections and numbers the blocks that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diag.model.graph import Layer
from diag.roles.view import View


@dataclass(frozen=True, slots=True)
class Unit:
    """One residual connection: the Add, the tensor that skips, and the ids of the layers it skips."""

    add: Layer
    skip: str
    branch: frozenset[str]


def find_units(view: View) -> tuple[Unit, ...]:
    """Residual connections in graph order; their Adds get the role in `view`."""
    found = [unit for layer in view.layers if (unit := _unit(view, layer)) is not None]
    view.give((unit.add for unit in found), "residual_add")
    for layer in view.layers:
        if view.role(layer) is None and _joins_branches(view, layer):
            view.give([layer], "residual_add")
    return tuple(found)


def _unit(view: View, layer: Layer) -> Unit | None:
    if not view.is_op(layer, view.rules.residual.add) or view.role(layer) not in (None, "norm"):
        return None
    operands = [name for name in layer.inputs[:2] if name and view.dynamic(name)]
    if len(operands) != 2 or operands[0] == operands[1]:
        return None
    for skip, branch in (operands, operands[::-1]):
        layers = between(view, skip, [branch])
        if _works(view, layers):
            return Unit(layer, skip, frozenset(layers))
    return _projected(view, layer, operands)


def _works(view: View, layers: Iterable[str]) -> bool:
    """Whether a branch holds a contraction or attention; x + c x^3 inside an activation does not."""
    by_id = view.model.layer_by_id
    kinds = ("contraction", *view.rules.attention.fused)
    return any(view.is_op(by_id[i], kinds) for i in layers)


def _projected(view: View, layer: Layer, operands: list[str]) -> Unit | None:
    """A shortcut with a convolution of its own."""
    for name, branch in (operands, operands[::-1]):
        shortcut: set[str] = set()
        skip = name
        while (maker := view.producer(skip)) and view.is_op(maker, view.rules.residual.shortcut):
            if view.role(maker) is not None or len(view.data(maker)) != 1:
                break
            shortcut.add(maker.id)
            skip = view.data(maker)[0]
            layers = between(view, skip, [branch])
            if _works(view, layers) and _works(view, shortcut):
                return Unit(layer, skip, frozenset(layers | shortcut))
    return None


def _joins_branches(view: View, layer: Layer) -> bool:
    """attention + FFN, added to each other before they are added to the stream."""
    if layer.op_type != "Add" or len(view.data(layer)) != 2:
        return False
    readers = view.readers(layer.outputs[0])
    makers = [view.producer(name) for name in view.data(layer)]
    joined = all(m is not None and view.is_op(m, ("matmul", "Add", "Mul")) for m in makers)
    return joined and len(readers) == 1 and view.role(readers[0]) == "residual_add"


def between(view: View, start: str, ends: Iterable[str]) -> set[str]:
    """Ids of the layers on the ways from the tensor `start` to the tensors `ends`."""
    maker = view.producer(start)
    first = -1 if maker is None else maker.index
    window: dict[str, Layer] = {}
    queue = list(ends)
    while queue:
        layer = view.producer(queue.pop())
        if layer is None or layer.id in window or layer.index <= first:
            continue
        window[layer.id] = layer
        queue += [name for name in layer.reads if view.dynamic(name)]
    reached = {start}
    inside: set[str] = set()
    for layer in sorted(window.values(), key=lambda x: x.index):
        if not reached.isdisjoint(layer.reads):
            inside.add(layer.id)
            reached.update(layer.outputs)
    return inside if not reached.isdisjoint(ends) else set()
