"""The graph as role finding sees it: which operands depend on the model's inputs, and walks along them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from onnx import TensorProto

from diag.model.graph import FLOAT_TYPES, Layer, Model
from diag.roles.rules import RoleRules, WalkRule

_TYPED_BY_SECOND = frozenset({"Where", "OneHot"})
_BOOLEAN = frozenset(
    {"Not", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf"}
)
_INTEGER = frozenset({"Shape", "Size", "ArgMax", "ArgMin", "NonZero", "QuantizeLinear"})


@dataclass(frozen=True, slots=True)
class Found:
    """What a walk found: the layers it looked for, and the layers on the ways to them, in graph order."""

    hits: tuple[Layer, ...]
    passed: tuple[Layer, ...]


@dataclass(frozen=True)
class View:
    """A model, the rules, and the roles given so far (by layer id)."""

    model: Model
    rules: RoleRules
    roles: dict[str, str] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers whose values depend on the model's inputs."""
        dependent = self.model.value_dependent
        return tuple(x for x in self.model.layers if any(name in dependent for name in x.outputs))

    @cached_property
    def floats(self) -> frozenset[str]:
        """Floating-point tensors, by following types through the graph."""
        known = {name: info.elem_type for name, info in self.model.inputs.items()}
        known.update((name, tensor.data_type) for name, tensor in self.model.initializers.items())
        for layer in self.model.layers:
            elem_type = _output_type(layer, known)
            known.update((name, elem_type) for name in layer.outputs if name)
        return frozenset(name for name, elem_type in known.items() if elem_type in FLOAT_TYPES)

    def give(self, layers: Iterable[Layer], role: str) -> None:
        """Give a role to the layers that have none yet."""
        for layer in layers:
            self.roles.setdefault(layer.id, role)

    def role(self, layer: Layer) -> str | None:
        return self.roles.get(layer.id)

    def is_op(self, layer: Layer | None, names: Iterable[str]) -> bool:
        """Whether the layer's operator is one of `names` (operators or sets of the rules)."""
        return layer is not None and key(layer) in self._ops(tuple(names))

    def _ops(self, names: tuple[str, ...]) -> frozenset[str]:
        if names not in self._sets:
            self._sets[names] = self.rules.ops(names)
        return self._sets[names]

    @cached_property
    def _sets(self) -> dict[tuple[str, ...], frozenset[str]]:
        return {}

    def dynamic(self, name: str) -> bool:
        """Whether a tensor's values depend on the model's inputs."""
        return name in self.model.value_dependent

    def data(self, layer: Layer) -> tuple[str, ...]:
        """Inputs that carry data and depend on the model's inputs."""
        places = self.rules.data.get(key(layer))
        names = layer.inputs if places is None else [layer.inputs[i] for i in places if i < len(layer.inputs)]
        return tuple(name for name in names if name and self.dynamic(name))

    def producer(self, name: str) -> Layer | None:
        return self.model.producers.get(name)

    def readers(self, name: str) -> tuple[Layer, ...]:
        """Layers that read a tensor's values; those that read its shape only are left out."""
        found = self.model.consumers.get(name, ())
        return tuple(x for x in found if self.dynamic(x.outputs[0]))

    def before_casts(self, name: str) -> str:
        """The tensor that `name` is a converted copy of."""
        while (layer := self.producer(name)) is not None and layer.op_type in ("Cast", "Identity"):
            name = layer.inputs[0]
        return name

    def is_product(self, layer: Layer) -> bool:
        """A contraction whose operands both depend on the model's inputs."""
        return self.is_op(layer, ("contraction",)) and self._dynamic_operands(layer) == 2

    def is_weighted(self, layer: Layer) -> bool:
        """A contraction of one operand that depends on the model's inputs with a weight."""
        return self.is_op(layer, ("contraction",)) and self._dynamic_operands(layer) == 1

    def _dynamic_operands(self, layer: Layer) -> int:
        return sum(self.dynamic(name) for name in layer.inputs[:2])

    def walk(self, start: Iterable[str], rule: WalkRule) -> Found:
        """Follow `rule` from the tensors `start`.

        Without `until`, every layer that can be passed is found. Layers off the ways to a hit are left out.
        """
        back = rule.direction == "back"
        came_from: dict[str, set[str]] = {}
        hits: dict[str, Layer] = {}
        passed: dict[str, Layer] = {}
        queue: list[tuple[str, str]] = [(name, "") for name in start]
        while queue:
            tensor, origin = queue.pop()
            for layer in self._next(tensor, back):
                came_from.setdefault(layer.id, set()).add(origin)
                if layer.id in passed or layer.id in hits:
                    continue
                if self._is_hit(layer, rule):
                    hits[layer.id] = layer
                elif self._may_pass(layer, rule):
                    passed[layer.id] = layer
                    onward = self.data(layer) if back else layer.outputs
                    queue += [(name, layer.id) for name in onward if name]
        kept = passed.keys() if rule.until is None else _on_the_way(hits, came_from)
        return Found(_ordered(hits.values()), _ordered(passed[i] for i in kept if i in passed))

    def _next(self, tensor: str, back: bool) -> Iterator[Layer]:
        if not back:
            yield from (x for x in self.readers(tensor) if tensor in self.data(x))
            return
        layer = self.producer(tensor)
        if layer is not None and self.dynamic(tensor):
            yield layer

    def _is_hit(self, layer: Layer, rule: WalkRule) -> bool:
        if rule.until is None or self.role(layer) in rule.roles:
            return False
        if rule.until == "wave":
            return self.is_op(layer, self.rules.rope.wave)
        if rule.grouped and _is_grouped(layer):
            return False
        return self.is_product(layer) if rule.until == "product" else self.is_weighted(layer)

    def _may_pass(self, layer: Layer, rule: WalkRule) -> bool:
        role = self.role(layer)
        is_static = self.is_op(layer, rule.static) and len(self.data(layer)) == 1
        if role is not None:
            return role in rule.roles or (role in rule.biased and is_static)
        if self.is_op(layer, rule.through) or self.is_op(layer, rule.guard):
            return True
        if rule.grouped and _is_grouped(layer):
            return True
        return is_static

    def mark(self, found: Found, rule: WalkRule) -> None:
        """Give the layers on the way the roles that the rule has for them."""
        for layer in found.passed:
            if layer.op_type in rule.mark:
                self.give([layer], rule.mark[layer.op_type])

    def bias_of(self, layer: Layer) -> tuple[Layer, ...]:
        """The Add of a constant behind a contraction, and a norm that folds into it."""
        found: list[Layer] = []
        while True:
            readers = self.readers((found[-1] if found else layer).outputs[0])
            if len(readers) != 1 or self.role(readers[0]) is not None:
                return tuple(found)
            biased = any(x.op_type == "Add" for x in found)
            if not self._is_bias(readers[0], biased):
                return tuple(found)
            found.append(readers[0])

    def _is_bias(self, layer: Layer, biased: bool) -> bool:
        if self.is_op(layer, self.rules.norm.folded):
            return True
        return layer.op_type == "Add" and len(self.data(layer)) == 1 and not biased

    def give_with_bias(self, layers: Iterable[Layer], role: str) -> None:
        """Give a role to contractions and to what belongs to them."""
        for layer in layers:
            if self.role(layer) is None:
                self.give([layer, *self.bias_of(layer)], role)


def key(layer: Layer) -> str:
    """The operator as the rules write it."""
    return f"{layer.domain}:{layer.op_type}" if layer.domain else layer.op_type


def _is_grouped(layer: Layer) -> bool:
    groups = layer.attributes.get("group", 1)
    return layer.op_type == "Conv" and isinstance(groups, int) and groups > 1


def _ordered(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    return tuple(sorted(layers, key=lambda layer: layer.index))


def _on_the_way(hits: dict[str, Layer], came_from: dict[str, set[str]]) -> set[str]:
    """Ids of layers from which a hit was reached."""
    kept: set[str] = set()
    queue = list(hits)
    while queue:
        for origin in came_from.get(queue.pop(), ()):
            if origin and origin not in kept:
                kept.add(origin)
                queue.append(origin)
    return kept


def _output_type(layer: Layer, known: dict[str, int]) -> int:
    if layer.op_type in _BOOLEAN:
        return TensorProto.BOOL
    if layer.op_type in _INTEGER:
        return TensorProto.INT64
    if layer.op_type == "Cast":
        to = layer.attributes.get("to")
        return to if isinstance(to, int) else 0
    if layer.op_type in ("Constant", "ConstantOfShape"):
        return TensorProto.FLOAT  # a constant is never asked for its own sake
    place = 1 if layer.op_type in _TYPED_BY_SECOND else 0
    if layer.op_type == "DequantizeLinear":
        place = 1
    names = [name for name in layer.inputs[place:] if name]
    return known.get(names[0], TensorProto.FLOAT) if names else TensorProto.FLOAT
