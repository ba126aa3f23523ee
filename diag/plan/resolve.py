"""A plan applied to a model's layers: one format for each layer, and which pin gave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from diag.errors import PlanError
from diag.model.graph import Model, TensorInfo
from diag.plan.groups import Group, find_groups
from diag.plan.layers import OPERAND_OPS, FloatLayers, float_layers
from diag.plan.match import Targets
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


def resolve(
    plan: Plan,
    model: Model,
    roles: Mapping[str, str],
    blocks: Mapping[str, int | None],
    norm_parts: Sequence[frozenset[str]],
    tensors: Mapping[str, TensorInfo] | None = None,
) -> Resolved:
    """Give each layer of `model` its format.

    `default` (and a pin) of fp32, fp16 or bf16 means every float layer. An operand format (int8, fp8,
    int4, tf32) means the operands of Conv, ConvTranspose, MatMul and Gemm; a pin whose layers hold none of
    these means the layers it matches. The last matching pin wins; a pin moves the groups of its layers,
    unless it stands `alone`. `tensors` is `diag.model.shapes.infer(model)`, done here when not given.

    Raises PlanError for a pin that matches nothing, asks for what cannot be, or contradicts another.
    """
    floats = float_layers(model, tensors)
    groups = find_groups(model, norm_parts, blocks, floats)
    formats = {layer.id: UNTOUCHED for layer in model.layers} | _defaults(plan, floats)
    targets = Targets(model, roles, blocks)
    owner: dict[str, int] = {}
    moves: list[_Move] = []
    for index, pin in enumerate(plan.pins):
        move = _move(pin, index, targets, floats, groups)
        moves.append(move)
        for layer in (*move.matched, *move.spread):
            formats[layer], owner[layer] = pin.format, index
    _refuse_contradictions(plan, groups)
    pins = tuple(_resolved_pin(move, owner, formats) for move in moves)
    return Resolved(formats, pins, _moved_groups(plan, groups, owner, formats))


@dataclass(frozen=True)
class _Move:
    index: int
    pin: Pin
    matched: tuple[str, ...]
    spread: frozenset[str]


def _defaults(plan: Plan, floats: FloatLayers) -> dict[str, str]:
    if plan.default not in OPERAND_FORMATS:
        return dict.fromkeys(floats.ids, plan.default)
    lowered = floats.weighted if plan.default == "int4" else floats.operand
    return {layer: plan.default if layer in lowered else plan.base for layer in floats.ids}


def _move(pin: Pin, index: int, targets: Targets, floats: FloatLayers, groups: Iterable[Group]) -> _Move:
    found = targets.match(pin)
    if not found:
        raise targets.unmatched(pin, index)
    matched = _asked(pin, index, found, floats)
    spread = frozenset() if pin.alone else _companions(pin, frozenset(matched), groups)
    return _Move(index, pin, matched, spread)


def _asked(pin: Pin, index: int, found: tuple[str, ...], floats: FloatLayers) -> tuple[str, ...]:
    """Layers among those a pin matches that its format is for. Raises PlanError when there are none."""
    allowed = frozenset(floats.ids)
    lowerable = tuple(layer for layer in found if layer in allowed)
    if not lowerable:
        raise PlanError(
            f"pin {index + 1} ({pin}) matches only constants, shape arithmetic, or layers with subgraphs, "
            f"which keep their types",
            "Pin a layer that reads them.",
        )
    if pin.format not in OPERAND_FORMATS:
        return lowerable
    operand = tuple(layer for layer in lowerable if layer in floats.operand)
    if pin.format == "int4":
        return _or_refuse(pin, index, [x for x in operand if x in floats.weighted], "that have weights")
    if pin.format == "tf32":
        return _or_refuse(pin, index, operand, "")
    return operand or lowerable


def _or_refuse(pin: Pin, index: int, layers: Sequence[str], which: str) -> tuple[str, ...]:
    if layers:
        return tuple(layers)
    names = ", ".join(sorted(OPERAND_OPS))
    raise PlanError(
        f"pin {index + 1} ({pin}) asks for {pin.format}, which is for {names} layers {which}".rstrip()
        + ", and matches none",
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
    seen: dict[str, _Named] = {}
    for index, pin in enumerate(plan.pins):
        if pin.exact_name is None:
            continue
        first = seen.setdefault(pin.exact_name, (index, pin))
        if first[1].format != pin.format:
            raise _contradiction(first, (index, pin), "both name that layer")
    for group in groups:
        inside = sorted((seen[x] for x in group.layers if x in seen), key=lambda named: named[0])
        inside = [named for named in inside if not named[1].alone]
        for other in inside[1:]:
            if other[1].format != inside[0][1].format and _forces(group, other[1], inside[0][1]):
                raise _contradiction(inside[0], other, f"their layers move together ({group.kind})")


def _forces(group: Group, *pins: Pin) -> bool:
    return group.kind != "norm" or all(pin.format not in QUANTIZED_FORMATS for pin in pins)


def _contradiction(first: _Named, second: _Named, why: str) -> PlanError:
    return PlanError(
        f"pins {first[0] + 1} ({first[1]}: {first[1].format}) and {second[0] + 1} "
        f"({second[1]}: {second[1].format}) contradict each other: {why}",
        "Keep one of them, or mark one `alone: true`.",
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
