"""A plan applied to a model's layers: one format for each layer, and which pin gave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from diag.errors import PlanError
from diag.model.graph import Model, TensorInfo
from diag.numerics.formats import BLOCK_FORMATS
from diag.plan.groups import Group, find_groups
from diag.plan.layers import FloatLayers, float_layers
from diag.plan.match import Targets
from diag.plan.residual import residual_adds
from diag.plan.schema import OPERAND_FORMATS, QUANTIZED_FORMATS, Pin, Plan

UNTOUCHED = "fp32"
"""Format of layers that no plan lowers: constants, shape and index arithmetic, If, Loop and Scan."""


_Named = tuple[int, Pin]
"""A pin that names one layer, after its position in the plan."""


@dataclass(frozen=True)
class ResolvedPin:
    """What a pin did. Layer ids in graph order."""

    index: int
    target: str
    format: str
    reason: str
    matched: tuple[str, ...]
    """Layers that it asks for."""
    spread: tuple[str, ...]
    """Layers that it did not name, moved because they belong to a group of one that it did."""
    layers: tuple[str, ...]
    """Layers of both kinds whose format is this pin's in the end, after all later pins."""


@dataclass(frozen=True)
class Resolved:
    """A plan in terms of one model's layers."""

    formats: Mapping[str, str]
    """Layer id to format, for every layer of the model, in graph order."""
    pins: tuple[ResolvedPin, ...]
    groups: tuple[Group, ...]
    """Groups that a pin moved, and Adds and Concats that are quantized."""


@dataclass(frozen=True)
class Resolver:
    """What resolving needs to know of one model; made once, it resolves any number of plans."""

    targets: Targets
    floats: FloatLayers
    groups: tuple[Group, ...]

    @classmethod
    def of(
        cls,
        model: Model,
        roles: Mapping[str, str],
        blocks: Mapping[str, int | None],
        norm_parts: Sequence[frozenset[str]],
        tensors: Mapping[str, TensorInfo] | None = None,
    ) -> Resolver:
        """Learn the model. `tensors` is `diag.model.shapes.infer(model)`, done here when it is not given."""
        floats = float_layers(model, tensors)
        return cls(Targets(model, roles, blocks), floats, find_groups(model, norm_parts, blocks, floats))

    def resolve(self, plan: Plan) -> Resolved:
        """Give each layer its format; see `resolve`. Raises PlanError."""
        layers = self.targets.model.layers
        formats = {layer.id: UNTOUCHED for layer in layers} | _defaults(plan, self.floats)
        owner: dict[str, int] = {}
        moves = [_move(pin, index, self) for index, pin in enumerate(plan.pins)]
        for move in moves:
            for layer in (*move.matched, *move.spread):
                formats[layer], owner[layer] = move.pin.format, move.index
        _refuse_contradictions(plan, self.groups)
        if plan.placement == "fused":
            formats |= residual_adds(self.targets.model, formats, self.floats.ids, owner)
        pins = tuple(_resolved_pin(move, owner, formats) for move in moves)
        return Resolved(formats, pins, _moved_groups(plan, self.groups, owner, formats))


def resolve(
    plan: Plan,
    model: Model,
    roles: Mapping[str, str],
    blocks: Mapping[str, int | None],
    norm_parts: Sequence[frozenset[str]],
    tensors: Mapping[str, TensorInfo] | None = None,
) -> Resolved:
    """Give each layer of `model` its format.

    A `default` or pin of fp32, fp16 or bf16 means every float layer. An operand format (int8, fp8, tf32)
    means the operands of Conv, ConvTranspose, MatMul and Gemm, and leaves the others as they were; a pin
    that matches none of these four means the layers it does match. A block format (int4, mxfp8, nvfp4) means
    MatMul and Gemm with constant weights on the right.
    The last matching pin wins. A pin moves the groups of its layers along, unless it stands `alone`.

    Raises PlanError for a pin that matches nothing, asks for what cannot be, or contradicts another.
    """
    return Resolver.of(model, roles, blocks, norm_parts, tensors).resolve(plan)


@dataclass(frozen=True)
class _Move:
    index: int
    pin: Pin
    matched: tuple[str, ...]
    spread: frozenset[str]


def _defaults(plan: Plan, floats: FloatLayers) -> dict[str, str]:
    if plan.default not in OPERAND_FORMATS:
        return dict.fromkeys(floats.ids, plan.default)
    lowered = floats.blocked if plan.default in BLOCK_FORMATS else floats.operand
    return {layer: plan.default if layer in lowered else plan.base for layer in floats.ids}


def _move(pin: Pin, index: int, known: Resolver) -> _Move:
    found = known.targets.match(pin)
    if not found:
        raise known.targets.unmatched(pin, index)
    matched = _asked(pin, index, found, known.floats)
    spread = frozenset[str]() if pin.alone else _companions(pin, frozenset(matched), known.groups)
    return _Move(index, pin, matched, spread)


def _asked(pin: Pin, index: int, found: Sequence[str], floats: FloatLayers) -> tuple[str, ...]:
    """Layers among those a pin matches that its format is for. Raises PlanError when there are none."""
    allowed = frozenset(floats.ids)
    lowerable = tuple(layer for layer in found if layer in allowed)
    if not lowerable:
        raise PlanError(
            f"pin {index + 1} ({pin}) matches only layers that keep their types: constants, shape and index "
            f"arithmetic, subgraphs or quantizers",
            "Pin a layer that reads their outputs.",
        )
    if pin.format not in OPERAND_FORMATS:
        return lowerable
    operand = tuple(layer for layer in lowerable if layer in floats.operand)
    if pin.format in BLOCK_FORMATS:
        blocked = tuple(layer for layer in operand if layer in floats.blocked)
        return blocked or _refuse(pin, index, "MatMul and Gemm layers with constant weights on the right")
    if pin.format == "tf32":
        return operand or _refuse(pin, index, f"{_OPERAND_NAMES} layers")
    fed = tuple(layer for layer in lowerable if layer in floats.fed)
    return operand or fed or _refuse(pin, index, "layers that read floating-point tensors")


_OPERAND_NAMES = "Conv, ConvTranspose, Gemm and MatMul"


def _refuse(pin: Pin, index: int, what: str) -> NoReturn:
    raise PlanError(
        f"pin {index + 1} ({pin}) asks for {pin.format}, which is for {what}, and matches none",
        "Choose another format.",
    )


def _companions(pin: Pin, matched: frozenset[str], groups: Iterable[Group]) -> frozenset[str]:
    """Layers that move with those a pin matched.

    A quantized part of a norm does not draw in the others: they get scales only when asked for.
    """
    moved: set[str] = set()
    for group in groups:
        if group.kind == "norm" and pin.format in QUANTIZED_FORMATS:
            continue
        if not matched.isdisjoint(group.layers):
            moved.update(group.layers)
    return frozenset(moved - matched)


def _resolved_pin(move: _Move, owner: Mapping[str, int], order: Iterable[str]) -> ResolvedPin:
    held = {layer for layer, index in owner.items() if index == move.index}
    return ResolvedPin(
        move.index,
        str(move.pin),
        move.pin.format,
        move.pin.reason,
        move.matched,
        tuple(layer for layer in order if layer in move.spread),
        tuple(layer for layer in order if layer in held),
    )


def _refuse_contradictions(plan: Plan, groups: Iterable[Group]) -> None:
    """Two exact names that give one layer, or one group, two formats cannot both be meant."""
    hint = "Keep one of them, or give one of them `alone: true`."
    seen: dict[str, _Named] = {}
    for index, pin in enumerate(plan.pins):
        if pin.exact_name is None:
            continue
        first = seen.setdefault(pin.exact_name, (index, pin))
        if first[1].format != pin.format:
            raise _contradiction(first, (index, pin), "both name that layer", "Keep one of them.")
    for group in groups:
        inside = sorted((seen[x] for x in group.layers if x in seen), key=lambda named: named[0])
        inside = [named for named in inside if not named[1].alone]
        for other in inside[1:]:
            if other[1].format != inside[0][1].format and _forces(group, other[1], inside[0][1]):
                raise _contradiction(inside[0], other, f"their layers move together ({group.kind})", hint)


def _forces(group: Group, *pins: Pin) -> bool:
    return group.kind != "norm" or all(pin.format not in QUANTIZED_FORMATS for pin in pins)


def _contradiction(first: _Named, second: _Named, why: str, hint: str) -> PlanError:
    return PlanError(
        f"pins {first[0] + 1} ({first[1]}: {first[1].format}) and {second[0] + 1} "
        f"({second[1]}: {second[1].format}) contradict each other: {why}",
        hint,
    )


def _moved_groups(
    plan: Plan, groups: Iterable[Group], owner: Mapping[str, int], formats: Mapping[str, str]
) -> tuple[Group, ...]:
    """Groups whose layers share a pin's format, and joins whose inputs are quantized."""
    found: list[Group] = []
    for group in groups:
        first = group.layers[0]
        if group.kind in ("add_inputs", "concat_inputs"):
            if formats[first] in QUANTIZED_FORMATS:
                by = str(plan.pins[owner[first]]) if first in owner else ""
                found.append(replace(group, format=formats[first], moved_by=by))
            continue
        for index in sorted({owner[layer] for layer in group.layers if layer in owner}):
            layers = tuple(layer for layer in group.layers if owner.get(layer) == index)
            if len(layers) > 1:
                pin = plan.pins[index]
                found.append(replace(group, layers=layers, format=pin.format, moved_by=str(pin)))
    return tuple(found)
