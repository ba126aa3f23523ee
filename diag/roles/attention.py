"""Finds attention: a softmax between the product of queries and keys and the product with the values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diag.model.graph import Layer
from diag.roles.view import Found, View


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention, by layer ids in graph order.

    `q`, `k`, `v` and `out` hold projections with their biases; one layer that makes all three stands in
    each of them. `scale` and `mask` hold what is applied to the scores or the operands. A fused operator
    stands in `qk`, `softmax` and `pv`. Any of them may be empty, except `softmax`.
    """

    q: tuple[str, ...]
    k: tuple[str, ...]
    v: tuple[str, ...]
    qk: tuple[str, ...]
    scale: tuple[str, ...]
    mask: tuple[str, ...]
    softmax: tuple[str, ...]
    pv: tuple[str, ...]
    out: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """Every layer, each once."""
        groups = (self.q, self.k, self.v, self.qk, self.scale, self.mask, self.softmax, self.pv, self.out)
        return tuple(dict.fromkeys(name for group in groups for name in group))


def find_attention(view: View) -> tuple[Attention, ...]:
    """Every attention in graph order; the roles of its layers are given in `view`."""
    found: list[Attention] = []
    for layer in view.layers:
        one = None
        if view.is_op(layer, view.rules.attention.fused):
            one = _fused(view, layer)
        elif view.is_op(layer, view.rules.attention.anchor):
            one = _spelled_out(view, layer)
        if one is not None:
            found.append(one)
    return tuple(found)


def _spelled_out(view: View, softmax: Layer) -> Attention | None:
    rule = view.rules.attention
    scores = view.walk(softmax.inputs[:1], rule.scores)
    values = view.walk(softmax.outputs[:1], rule.values)
    products = [x for x in scores.hits if view.role(x) is None]
    if not products or not values.hits:
        return None
    middle = [softmax, *(x for x in values.passed if view.is_op(x, rule.values.guard))]
    view.give(middle, "attn_softmax")
    view.give(products, "qk_matmul")
    view.give(values.hits, "pv_matmul")
    view.mark(scores, rule.scores)
    _give_mask(view, scores, softmax)
    carried = {softmax.outputs[0], *(name for x in values.passed for name in x.outputs)}
    sides = (
        [x.inputs[0] for x in products],
        [x.inputs[1] for x in products],
        [name for x in values.hits for name in view.data(x) if name not in carried],
    )
    operands = [view.walk(names, rule.operand) for names in sides]
    q, k, v = (_give_projections(view, found) for found in operands)
    relative = _give_relative(view, softmax)
    passed = [x for found in (scores, *operands, relative) for x in found.passed]
    return Attention(
        q=q,
        k=k,
        v=v,
        qk=_ids([*products, *(x for x in relative.hits if view.role(x) == "qk_matmul")]),
        scale=_ids(x for x in passed if view.role(x) == "attn_scale"),
        mask=_ids(x for x in passed if view.role(x) == "attn_mask"),
        softmax=_ids(middle),
        pv=_ids(values.hits),
        out=_give_output(view, values.hits),
    )


def _fused(view: View, layer: Layer) -> Attention:
    view.give([layer], "attn_softmax")
    _mark_mask(view, [name for name in layer.inputs[3:] if name])
    operands = [view.walk([name], view.rules.attention.operand) for name in layer.inputs[:3]]
    operands += [Found((), ())] * (3 - len(operands))
    q, k, v = (_give_projections(view, found) for found in operands)
    passed = [x for found in operands for x in found.passed]
    scale = _ids(x for x in passed if view.role(x) == "attn_scale")
    itself, out = (layer.id,), _give_output(view, [layer])
    return Attention(q, k, v, qk=itself, scale=scale, mask=(), softmax=itself, pv=itself, out=out)


def _give_projections(view: View, found: Found) -> tuple[str, ...]:
    """Ids of the projections that a walk from an operand found, biases included."""
    made = [x for x in found.hits if view.role(x) in (None, "qkv_proj")]
    view.give_with_bias(made, "qkv_proj")
    view.mark(found, view.rules.attention.operand)
    return tuple(i for x in made for i in _with_bias(view, x))


def _give_relative(view: View, softmax: Layer) -> Found:
    """Terms of the scores that come from queries or keys and constant positions."""
    rule = view.rules.attention
    found = view.walk(softmax.inputs[:1], rule.relative)
    terms = [x for x in found.hits if view.role(x) is None and _reads_projection(view, x)]
    if not terms:
        return Found((), ())
    view.give(terms, "qk_matmul")
    view.mark(found, rule.relative)
    return found


def _reads_projection(view: View, layer: Layer) -> bool:
    hits = view.walk(view.data(layer)[:1], view.rules.attention.operand).hits
    return any(view.role(x) == "qkv_proj" for x in hits)


def _give_output(view: View, values: Iterable[Layer]) -> tuple[str, ...]:
    """Ids of the output projection, bias included."""
    behind = [name for x in values for name in x.outputs[:1]]
    out = [x for x in view.walk(behind, view.rules.attention.output).hits if view.role(x) is None]
    view.give_with_bias(out, "attn_out_proj")
    return tuple(i for x in out for i in _with_bias(view, x))


def _ids(layers: Iterable[Layer]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.id for x in layers))


def _with_bias(view: View, layer: Layer) -> list[str]:
    """The layer and the layers behind it that took its role as its bias."""
    ids = [layer.id]
    while len(readers := view.readers(layer.outputs[0])) == 1:
        layer = readers[0]
        if view.role(layer) != view.roles[ids[0]] or view.is_op(layer, ("contraction",)):
            break
        ids.append(layer.id)
    return ids


def _give_mask(view: View, scores: Found, softmax: Layer) -> None:
    """Roles for the layers that make what is added to, or chosen instead of, the scores."""
    path = {softmax.inputs[0], *(n for x in (*scores.passed, *scores.hits) for n in x.outputs)}
    masks = [x for x in scores.passed if view.role(x) == "attn_mask"]
    _mark_mask(view, [name for x in masks for name in x.reads if name not in path])


def _mark_mask(view: View, names: list[str]) -> None:
    made = view.walk([name for name in names if view.dynamic(name)], view.rules.attention.mask).passed
    view.give((x for x in made if _computes_mask(view, x)), "attn_mask")


def _computes_mask(view: View, layer: Layer) -> bool:
    return layer.outputs[0] in view.floats and view.is_op(layer, ("pointwise",))
