"""Finds rotary position embeddings: halves or neighbours of a tensor, turned by cosines and sines."""

from __future__ import annotations

from diag.model.graph import Layer
from diag.roles.view import View

_PAIR = frozenset({"Add", "Sub"})


def find_rope(view: View) -> None:
    """Give the role `rope` to rotations, and to their tables where positions are an input."""
    rotations = [layers for layer in view.layers if (layers := _turned_halves(view, layer))]
    rotations += _turned_pairs(view)
    for layers in rotations:
        view.give(layers, "rope")
    for layers in rotations:
        for layer in layers:
            _give_table(view, layer)
    view.give((x for x in view.layers if view.is_op(x, view.rules.rope.fused)), "rope")


def _turned_halves(view: View, concat: Layer) -> list[Layer]:
    """x * cos + concat(-x2, x1) * sin, where x1 and x2 are parts of x."""
    if concat.op_type != "Concat" or len(view.data(concat)) != 2:
        return []
    first, second = (_part(view, name) for name in view.data(concat))
    if first is None or second is None or first[0] != second[0]:
        return []
    source, parts = first[0], [*first[1], *second[1]]
    if sum(x.op_type == "Neg" for x in parts) != 1:
        return []
    turned, between = _skip_moves(view, concat)
    product = next((x for x in view.readers(turned) if x.op_type == "Mul"), None)
    total = (
        next((x for x in view.readers(product.outputs[0]) if x.op_type == "Add"), None) if product else None
    )
    if product is None or total is None:
        return []
    straight = [view.producer(name) for name in total.inputs if name != product.outputs[0]]
    if len(straight) != 1 or straight[0] is None or straight[0].op_type != "Mul":
        return []
    if source not in map(view.before_casts, straight[0].inputs):
        return []
    return [*parts, concat, *between, product, straight[0], total]


def _part(view: View, name: str) -> tuple[str, list[Layer]] | None:
    """The tensor of which `name` is a part (perhaps negated), and the layers between."""
    layers: list[Layer] = []
    while (layer := view.producer(name)) is not None:
        layers.append(layer)
        if layer.op_type in ("Slice", "Split", "Gather"):
            return view.before_casts(layer.inputs[0]), layers
        if layer.op_type not in ("Neg", "Unsqueeze", "Squeeze", "Cast"):
            return None
        name = layer.inputs[0]
    return None


def _skip_moves(view: View, layer: Layer) -> tuple[str, list[Layer]]:
    """Output of the reshapes behind a layer, and those reshapes."""
    between: list[Layer] = []
    name = layer.outputs[0]
    while len(readers := view.readers(name)) == 1 and view.is_op(readers[0], ("reshape",)):
        between.append(readers[0])
        name = readers[0].outputs[0]
    return name, between


def _turned_pairs(view: View) -> list[list[Layer]]:
    """a * cos - b * sin together with a * sin + b * cos, where a and b are parts of one tensor."""
    seen: dict[frozenset[str], dict[str, list[Layer]]] = {}
    for layer in view.layers:
        if layer.op_type not in _PAIR or len(layer.inputs) != 2:
            continue
        products = [view.producer(name) for name in layer.inputs]
        if any(p is None or p.op_type != "Mul" for p in products):
            continue
        parts = [_first_part(view, p) for p in products if p is not None]
        if len(parts) == 2 and parts[0] and parts[1] and _one_source(view, parts[0], parts[1]):
            layers = [layer, *(p for p in products if p is not None)]
            seen.setdefault(frozenset(parts), {})[layer.op_type] = layers
    return [both["Add"] + both["Sub"] for both in seen.values() if both.keys() == _PAIR]


def _first_part(view: View, product: Layer) -> str:
    return next((name for name in view.data(product) if _part(view, name) is not None), "")


def _one_source(view: View, first: str, second: str) -> bool:
    a, b = _part(view, first), _part(view, second)
    return first != second and a is not None and b is not None and a[0] == b[0]


def _give_table(view: View, layer: Layer) -> None:
    """Roles for the cosines and sines that a rotation reads, when they depend on the model's inputs."""
    if layer.op_type != "Mul":
        return
    table = view.walk(view.data(layer), view.rules.rope.table)
    angles = [x for wave in table.hits for x in view.walk(wave.inputs, view.rules.rope.angle).passed]
    view.give((x for x in (*angles, *table.hits, *table.passed) if _computes(view, x)), "rope")


def _computes(view: View, layer: Layer) -> bool:
    floats = bool(layer.outputs) and layer.outputs[0] in view.floats
    return floats and not view.is_op(layer, ("reshape",))
