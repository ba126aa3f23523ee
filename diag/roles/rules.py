"""Reads `rules/roles.yaml`, the patterns by which roles are found."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field

from diag.resources import Rules, read_rules

ROLES = (
    "qkv_proj",
    "qk_matmul",
    "attn_scale",
    "attn_mask",
    "attn_softmax",
    "pv_matmul",
    "attn_out_proj",
    "ffn_up",
    "ffn_gate",
    "ffn_act",
    "ffn_down",
    "norm",
    "residual_add",
    "embedding",
    "rope",
    "lm_head",
    "conv",
    "pool",
    "head",
    "elementwise",
    "other",
)
"""Every role that a layer can have."""


class WalkRule(Rules):
    """A way through the graph; the head of `rules/roles.yaml` says what each key means."""

    direction: Literal["back", "forward"]
    through: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    guard: tuple[str, ...] = ()
    grouped: bool = False
    roles: tuple[str, ...] = ()
    biased: tuple[str, ...] = ()
    until: Literal["product", "weighted", "wave"] | None = None
    mark: dict[str, str] = Field(default_factory=dict)


class NormRule(Rules):
    fused: tuple[str, ...]
    affine_after: tuple[str, ...]
    folded: tuple[str, ...]


class RopeRule(Rules):
    fused: tuple[str, ...]
    table: WalkRule
    angle: WalkRule
    wave: tuple[str, ...]


class AttentionRule(Rules):
    fused: tuple[str, ...]
    anchor: tuple[str, ...]
    values: WalkRule
    scores: WalkRule
    relative: WalkRule
    operand: WalkRule
    output: WalkRule
    mask: WalkRule


class FfnRule(Rules):
    hidden: WalkRule
    alone: WalkRule
    contraction: str
    nonlinear: str


class ResidualRule(Rules):
    add: tuple[str, ...]
    shortcut: tuple[str, ...]


class EndsRule(Rules):
    origin: WalkRule
    entry: WalkRule
    output: WalkRule


class RoleRules(Rules):
    """The whole file."""

    version: Literal["trtdiag.roles/1"] = Field(alias="schema")
    sets: dict[str, tuple[str, ...]]
    data: dict[str, tuple[int, ...]]
    norm: NormRule
    rope: RopeRule
    attention: AttentionRule
    ffn: FfnRule
    residual: ResidualRule
    ends: EndsRule
    default: dict[str, tuple[str, ...]]

    def ops(self, names: tuple[str, ...]) -> frozenset[str]:
        """Operators meant by names of sets and of operators."""
        return frozenset(op for name in names for op in self._expand(name))

    def _expand(self, name: str) -> frozenset[str]:
        return self.ops(self.sets[name]) if name in self.sets else frozenset({name})


@cache
def role_rules() -> RoleRules:
    """The rules that come with this release; read once."""
    return read_rules("roles.yaml", RoleRules)
