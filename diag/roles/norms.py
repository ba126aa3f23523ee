"""Finds norms: one operator, or spelled out on any axis as mean of squares, root and division."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from diag.model.graph import Layer, Model
from diag.roles.view import View, key


def find_norms(view: View) -> tuple[frozenset[str], ...]:
    """The layers of each norm, by id, in graph order; their roles are given in `view`.

    Spelled out, a norm is: x (minus its mean), squared, averaged or summed, (plus eps or at least eps),
    square root, and x divided by it. Its scale and shift by constants belong to it.
    """
    found: list[set[str]] = []
    for layer in view.layers:
        parts = _fused(view, layer) or _spelled_out(view, layer)
        if not parts:
            continue
        shared = [group for group in found if not group.isdisjoint(parts)]
        for group in shared:
            found.remove(group)
            parts |= group
        found.append(parts)
        view.give((view.model.layer_by_id[i] for i in parts), "norm")
    return tuple(frozenset(group) for group in found)


def _fused(view: View, layer: Layer) -> set[str]:
    rule = view.rules.norm
    if not view.is_op(layer, rule.fused):
        return set()
    if view.is_op(layer, rule.folded) and _follows_contraction(view, layer):
        return set()
    affine = _affine(view, layer.outputs[0]) if view.is_op(layer, rule.affine_after) else set()
    return {layer.id} | affine


def _follows_contraction(view: View, layer: Layer) -> bool:
    before = view.producer(layer.inputs[0])
    while before is not None and before.op_type == "Add" and len(view.data(before)) == 1:
        before = view.producer(view.data(before)[0])
    return before is not None and view.is_weighted(before)


def _spelled_out(view: View, reduce: Layer) -> set[str]:
    """Parts of the norm whose mean of squares is computed by `reduce`; empty when it is no norm."""
    square, base = _squared(view, reduce)
    if base is None:
        return set()
    sources, before = _sources(view, base)
    means = _means(view, sources, reduce)
    centred = _centred(view, sources, means)
    statistics, closing = _statistics(view, reduce, sources | centred.keys(), means)
    if not closing:
        return set()
    divided = {name for i in closing for name in view.model.layer_by_id[i].inputs}
    before |= {i for name, i in centred.items() if name in divided}
    parts = {reduce.id, *(x.id for x in square), *before, *statistics, *closing}
    parts |= _used_means(view, parts, means)
    parts |= _own_casts(view, sources, parts)
    for name in closing:
        output = view.model.layer_by_id[name].outputs[0]
        parts |= _joined(view, output, parts) or _affine(view, output)
    return parts


def _squared(view: View, reduce: Layer) -> tuple[list[Layer], str | None]:
    """The layers that square, and the tensor that is squared; None when `reduce` sums no squares."""
    if not reduce.inputs or not view.dynamic(reduce.inputs[0]):
        return [], None
    if view.is_op(reduce, ("reduce_square",)):
        return [], reduce.inputs[0]
    if not view.is_op(reduce, ("reduce_mean",)):
        return [], None
    casts: list[Layer] = []
    layer = view.producer(reduce.inputs[0])
    while layer is not None and layer.op_type == "Cast":
        casts.append(layer)
        layer = view.producer(layer.inputs[0])
    if layer is None or not is_square(view.model, layer):
        return [], None
    return [*casts, layer], layer.inputs[0]


def is_square(model: Model, layer: Layer) -> bool:
    """Whether a layer squares its input."""
    if layer.op_type == "Mul":
        return layer.inputs[0] == layer.inputs[1]
    if layer.op_type != "Pow":
        return False
    exponent = model.constant(layer.inputs[1])
    return exponent is not None and exponent.size == 1 and float(exponent.reshape(())) == 2.0


def _sources(view: View, base: str) -> tuple[set[str], set[str]]:
    """Tensors that stand for the normalised data (centred or not, cast or not), and the layers between."""
    sources: set[str] = {base}
    layers: set[str] = set()
    layer = view.producer(base)
    while layer is not None and layer.op_type in ("Cast", "Identity"):
        layers.add(layer.id)
        sources.add(layer.inputs[0])
        layer = view.producer(layer.inputs[0])
    if layer is not None and layer.op_type == "Sub" and view.dynamic(layer.inputs[1]):
        layers.add(layer.id)
        sources.add(layer.inputs[0])
    else:
        layers = set()  # a Cast in front of an uncentred norm serves the residual stream too
    for name in tuple(sources):
        sources.update(x.outputs[0] for x in view.readers(name) if x.op_type == "Cast")
    return sources, layers


def _means(view: View, sources: Iterable[str], reduce: Layer) -> set[str]:
    """Tensors computed from means of the data alone."""
    means: set[str] = set()
    queue = [
        x.outputs[0]
        for name in sources
        for x in view.readers(name)
        if x.id != reduce.id and view.is_op(x, ("reduce_mean",))
    ]
    while queue:
        name = queue.pop()
        means.add(name)
        for layer in view.readers(name):
            inside = view.is_op(layer, ("statistic",)) and means.issuperset(view.data(layer))
            if inside and layer.outputs[0] not in means:
                queue.append(layer.outputs[0])
    return means


def _centred(view: View, sources: Iterable[str], means: set[str]) -> dict[str, str]:
    """The data minus a mean, where that is computed (again) for the division: tensor to layer id."""
    readers = [x for name in sources for x in view.readers(name)]
    return {x.outputs[0]: x.id for x in readers if x.op_type == "Sub" and x.inputs[1] in means}


def _statistics(view: View, reduce: Layer, sources: set[str], means: set[str]) -> tuple[set[str], set[str]]:
    """Layers from the mean of squares to the division, and the divisions themselves."""
    came_from: dict[str, str] = {}
    rooted = {reduce.outputs[0]: key(reduce) == "ReduceL2"}
    closing: dict[str, str] = {}
    queue = [reduce.outputs[0]]
    while queue:
        name = queue.pop()
        for layer in view.readers(name):
            others = set(view.data(layer)) - {name}
            if rooted[name] and _divides(layer, name) and others and others <= sources:
                closing[layer.id] = name
            elif view.is_op(layer, ("statistic",)) and others <= means:
                after = layer.outputs[0]
                if after not in rooted:
                    rooted[after] = rooted[name] or _is_root(view, layer)
                    came_from[after] = name
                    queue.append(after)
    statistics: set[str] = set()
    for name in closing.values():
        while name != reduce.outputs[0]:
            layer = view.model.producers[name]
            statistics.add(layer.id)
            name = came_from[name]
    return statistics, set(closing)


def _divides(layer: Layer, statistic: str) -> bool:
    """x / s or x * (1 / s)."""
    return layer.op_type == "Mul" or (layer.op_type == "Div" and layer.inputs[1] == statistic)


def _is_root(view: View, layer: Layer) -> bool:
    if layer.op_type != "Pow":
        return view.is_op(layer, ("root",))
    exponent = view.model.constant(layer.inputs[1])
    return exponent is not None and exponent.size == 1 and abs(float(exponent.reshape(()))) == 0.5


def _used_means(view: View, parts: set[str], means: set[str]) -> set[str]:
    """Layers that compute the means which the parts read."""
    used: set[str] = set()
    queue = [name for i in parts for name in view.data(view.model.layer_by_id[i]) if name in means]
    while queue:
        layer = view.model.producers[queue.pop()]
        if layer.id not in used:
            used.add(layer.id)
            queue += [name for name in view.data(layer) if name in means]
    return used


def _own_casts(view: View, sources: Iterable[str], parts: set[str]) -> set[str]:
    """Casts in front of the norm that nothing else reads."""
    casts = [x for name in sources if (x := view.producer(name)) is not None and x.op_type == "Cast"]
    return {x.id for x in casts if parts.issuperset(r.id for r in view.readers(x.outputs[0]))}


def _joined(view: View, output: str, parts: set[str]) -> set[str]:
    """x * r + (shift - mean * r): the Add and its other operand, as TensorFlow spells a norm."""
    for add in view.readers(output):
        others = [name for name in view.data(add) if name != output]
        if add.op_type != "Add" or len(others) != 1:
            continue
        shift = view.producer(others[0])
        if shift is None or shift.op_type != "Sub":
            continue
        product = view.producer(shift.inputs[1])
        makers = [view.producer(name) for name in view.data(product)] if product is not None else []
        if product is not None and makers and all(m is not None and m.id in parts for m in makers):
            return {add.id, shift.id, product.id}
    return set()


def _affine(view: View, output: str) -> set[str]:
    """The scale and the shift by constants behind a norm's output."""
    found: set[str] = set()
    for op in ("Mul", "Add"):
        layer, between = _only_reader(view, output)
        if layer is None or layer.op_type != op or not _by_vector(view, layer):
            continue
        found |= {layer.id, *between}
        output = layer.outputs[0]
    return found


def _only_reader(view: View, name: str) -> tuple[Layer | None, set[str]]:
    """The one layer that reads a tensor, behind casts and reshapes, and those."""
    between: set[str] = set()
    while True:
        readers = view.readers(name)
        if len(readers) != 1:
            return None, set()
        if readers[0].op_type not in ("Cast", "Identity", "Reshape"):
            return readers[0], between
        between.add(readers[0].id)
        name = readers[0].outputs[0]


def _by_vector(view: View, layer: Layer) -> bool:
    """Whether one operand is a constant of more than one value; a single number is a scale of its own."""
    static = [name for name in layer.inputs if name and not view.dynamic(name)]
    if len(static) != 1:
        return False
    tensor = view.model.initializers.get(static[0])
    if tensor is not None:
        return int(np.prod(tensor.dims)) > 1
    value = view.model.constant(static[0])
    return value is None or value.size > 1
