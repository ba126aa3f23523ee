"""Roles at the two ends of a network: embeddings where data enter, heads where results leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diag.model.graph import Layer
from diag.roles.residual import Unit
from diag.roles.view import View


def find_embeddings(view: View) -> None:
    """Look-ups of a constant table by the model's inputs, and the sums of such look-ups."""
    for layer in view.layers:
        if _is_lookup(view, layer):
            view.give([layer], "embedding")
    for layer in view.layers:
        if view.role(layer) is None and layer.op_type == "Add" and _sums_lookups(view, layer):
            view.give([layer], "embedding")


def _is_lookup(view: View, layer: Layer) -> bool:
    if layer.op_type != "Gather" or layer.outputs[0] not in view.floats:
        return False
    return not view.dynamic(layer.inputs[0]) and view.dynamic(layer.inputs[1])


def _sums_lookups(view: View, layer: Layer) -> bool:
    makers = [view.producer(name) for name in view.data(layer)]
    return bool(makers) and all(m is not None and view.role(m) == "embedding" for m in makers)


def find_origin(view: View, units: Sequence[Unit]) -> None:
    """Input projections, and sums with positions, in front of the first residual connection."""
    after = _behind_residuals(view)
    for unit in units:
        if unit.skip in after:
            continue
        entries = [x for x in view.walk([unit.skip], view.rules.ends.entry).hits if view.role(x) is None]
        view.give_with_bias((x for x in entries if view.is_op(x, ("matmul",))), "embedding")
        view.give_with_bias(entries, "conv")
        view.mark(view.walk([unit.skip], view.rules.ends.origin), view.rules.ends.origin)


def _behind_residuals(view: View) -> set[str]:
    """Tensors that depend on a residual connection."""
    after: set[str] = set()
    for layer in view.layers:
        if view.role(layer) == "residual_add" or not after.isdisjoint(layer.reads):
            after.update(layer.outputs)
    return after


def find_heads(view: View) -> None:
    """The last contraction in front of each output, its activation, and of these the language-model head."""
    widest = _vocabulary(view)
    for name in view.model.outputs:
        found = view.walk([name], view.rules.ends.output)
        for layer in found.hits:
            role = (
                "lm_head"
                if view.is_op(layer, ("matmul",)) and widest in _weight_dims(view, layer)
                else "head"
            )
            view.give_with_bias([layer], role)
        if found.hits:
            view.mark(found, view.rules.ends.output)


def _vocabulary(view: View) -> int:
    """Rows of the largest embedding table; 0 without one."""
    tables = [x.inputs[0] for x in view.layers if view.role(x) == "embedding" and x.op_type == "Gather"]
    return max((dims[0] for name in tables if (dims := _static_dims(view, name))), default=0)


def _weight_dims(view: View, layer: Layer) -> tuple[int, ...]:
    return next((_static_dims(view, name) for name in layer.inputs[:2] if not view.dynamic(name)), ())


def _static_dims(view: View, name: str) -> tuple[int, ...]:
    """Dimensions of the initializer or constant behind a weight, whatever turns or converts it."""
    while name not in view.model.initializers:
        layer = view.producer(name)
        if layer is None:
            return ()
        if layer.op_type == "Constant":
            value = view.model.constant(name)
            return () if value is None else tuple(value.shape)
        if not layer.inputs:
            return ()
        name = layer.inputs[0]
    return tuple(view.model.initializers[name].dims)


def find_hidden(view: View) -> None:
    """Projections outside residual branches that an activation follows: a plain multilayer perceptron."""
    for layer in view.layers:
        if view.role(layer) is not None or not view.is_op(layer, ("matmul",)) or not view.is_weighted(layer):
            continue
        behind = [layer, *view.bias_of(layer)][-1].outputs
        found = view.walk(behind, view.rules.ffn.alone).passed
        if any(view.is_op(x, (view.rules.ffn.nonlinear,)) for x in found):
            view.give_with_bias([layer], "ffn_up")


def give_defaults(view: View) -> None:
    """Roles by operator for what is left."""
    _give_convolutions(view, (x for x in view.layers if view.is_op(x, view.rules.default["conv"])))
    for role, ops in view.rules.default.items():
        named = (x for x in view.layers if view.is_op(x, ops) and x.outputs[0] in view.floats)
        view.give(named, role)


def _give_convolutions(view: View, layers: Iterable[Layer]) -> None:
    for layer in layers:
        view.give_with_bias([layer], "conv")
