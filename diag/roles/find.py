"""Finds the role and the block of every layer of a model, from the structure of its graph."""

from __future__ import annotations

from dataclasses import dataclass

from diag.model.graph import Model
from diag.roles.attention import Attention, find_attention
from diag.roles.blocks import number_blocks
from diag.roles.ends import find_embeddings, find_heads, find_hidden, find_origin, give_defaults
from diag.roles.ffn import find_ffn
from diag.roles.norms import find_norms
from diag.roles.residual import find_units
from diag.roles.rope import find_rope
from diag.roles.rules import role_rules
from diag.roles.view import View


@dataclass(frozen=True, slots=True)
class Role:
    """What a layer is for: a name of `ROLES`, and the number of its block (None outside the blocks)."""

    name: str
    block: int | None


@dataclass(frozen=True, slots=True)
class _Structure:
    roles: dict[str, Role]
    norms: tuple[frozenset[str], ...]
    attentions: tuple[Attention, ...]


def find_roles(model: Model) -> dict[str, Role]:
    """Role of each layer, by layer id; one entry for every layer.

    Layers whose values depend on shapes alone are `other` and in no block. Names play no part.
    """
    return dict(_structure(model).roles)


def norm_parts(model: Model) -> tuple[frozenset[str], ...]:
    """The layers of each norm, by id, in graph order: they change precision together."""
    return _structure(model).norms


def attention_blocks(model: Model) -> tuple[Attention, ...]:
    """The layers of each attention, in graph order."""
    return _structure(model).attentions


def _structure(model: Model) -> _Structure:
    """Found once for a model object, which nobody changes."""
    cached = model.__dict__.get(_CACHE_KEY)
    if not isinstance(cached, _Structure):
        cached = _find(model)
        model.__dict__[_CACHE_KEY] = cached
    return cached


_CACHE_KEY = "_roles_structure"


def _find(model: Model) -> _Structure:
    view = View(model, role_rules())
    norms = find_norms(view)
    find_rope(view)
    attentions = find_attention(view)
    find_embeddings(view)
    units = find_units(view)
    find_ffn(view, units)
    find_origin(view, units)
    find_heads(view)
    find_hidden(view)
    give_defaults(view)
    blocks = number_blocks(view, units, attentions, norms)
    roles = {x.id: Role(view.roles.get(x.id, "other"), blocks.get(x.id)) for x in model.layers}
    return _Structure(roles, norms, attentions)
