"""Finds feed-forward networks: a projection, an activation, perhaps a gate, a projection back."""

from __future__ import annotations

from collections.abc import Sequence

from diag.model.graph import Layer
from diag.roles.residual import Unit
from diag.roles.view import Found, View


def find_ffn(view: View, units: Sequence[Unit]) -> None:
    """Give the FFN roles to layers inside residual branches."""
    inside = frozenset(i for unit in units for i in unit.branch)
    for layer in view.layers:
        if layer.id in inside and view.role(layer) is None and _can_project(view, layer):
            _try_down(view, layer, inside)


def _can_project(view: View, layer: Layer) -> bool:
    return view.is_op(layer, (view.rules.ffn.contraction,)) and view.is_weighted(layer)


def _try_down(view: View, down: Layer, inside: frozenset[str]) -> None:
    """Give the roles when `down` turns out to be the last part of an FFN."""
    found = view.walk(view.data(down)[:1], view.rules.ffn.hidden)
    ups = [x for x in found.hits if x.id in inside and _can_project(view, x)]
    activations = [x for x in found.passed if view.is_op(x, (view.rules.ffn.nonlinear,))]
    free = all(view.role(x) in (None, "ffn_up", "ffn_gate") for x in ups)
    if not ups or len(ups) != len(found.hits) or not activations or not free:
        return
    gates = _gates(view, found, ups)
    view.give_with_bias([x for x in ups if x.id in gates], "ffn_gate")
    view.give_with_bias([x for x in ups if x.id not in gates], "ffn_up")
    view.give((x for x in found.passed if view.is_op(x, ("pointwise",))), "ffn_act")
    view.give_with_bias([down], "ffn_down")


def _gates(view: View, found: Found, ups: Sequence[Layer]) -> set[str]:
    """Of two projections that are multiplied, the one that goes through the activation."""
    if len(ups) != 2:
        return set()
    reached = {x.id: {x.id} for x in ups}
    active: dict[str, bool] = {x.id: False for x in ups}
    for layer in found.passed:
        makers = [m for name in view.data(layer) if (m := view.producer(name)) and m.id in reached]
        sides = [reached[m.id] for m in makers]
        reached[layer.id] = set().union(*sides)
        own = view.is_op(layer, (view.rules.ffn.nonlinear,))
        if len(reached[layer.id]) == len(ups) and all(len(side) == 1 for side in sides):
            return {i for m in makers if active[m.id] for i in reached[m.id]} - {
                i for m in makers if not active[m.id] for i in reached[m.id]
            }
        active[layer.id] = own or any(active[m.id] for m in makers)
    return set()
