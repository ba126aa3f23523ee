"""Why values of a layer are lost, and which layers must move together so that they are not.

A pin on the layer alone seldom helps: what it writes in FP32 is cast back to the narrow format for the next
layer. So the pins go on until the values fit again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diag.model.graph import Layer, Model
from diag.numerics.formats import FORMATS, Format, round_to
from diag.report.schema import LayerInfo

_SQUARES = frozenset({"Pow", "Mul", "ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare"})
_DIVIDES = frozenset({"Div", "Reciprocal", "Log", "Sqrt", "Pow"})
_SHIFTS = frozenset({"Add", "Sub", "Max", "Min", "Clip"})
"""Operators whose small constant keeps a divisor or a logarithm's argument away from zero."""

_MASKS = frozenset({"Add", "Sub", "Mul", "Where", "Min", "Max", "Expand", "Reshape", "Unsqueeze", "Cast"})
"""Operators between a mask's constant and the Softmax that it is for."""

_FAR = 4
"""So many layers away a constant is looked for."""


@dataclass(frozen=True)
class Cause:
    """A fault's kind, the layers it is born in (first first), and those to pin."""

    kind: str
    layers: tuple[str, ...]
    pins: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """The model and what was measured of its layers, by name."""

    model: Model
    layers: Mapping[str, LayerInfo]

    def cause(self, info: LayerInfo) -> Cause:
        """Why the layer's values are not finite where the reference's are."""
        fmt = FORMATS[info.format]
        layer = self.model.layer_by_id[info.name]
        mask = self._mask(layer, fmt)
        if mask:
            return Cause("mask-constant", mask, (*mask, *self._readers(mask[-1], fmt)))
        path = self._vanished(layer, fmt) if layer.op_type in _DIVIDES else ()
        if path:
            return Cause("small-constant", path, (*path, *self._readers(info.name, fmt)))
        return Cause(overflow_kind(info), (info.name,), (info.name, *self._readers(info.name, fmt)))

    def with_producers(self, info: LayerInfo) -> tuple[str, ...]:
        """The layer after those that write its inputs in the same format."""
        found = []
        for name in self.model.layer_by_id[info.name].reads:
            producer = self.model.producers.get(name)
            known = self.layers.get(producer.id) if producer else None
            if known is not None and known.format == info.format:
                found.append(known.name)
        return (*dict.fromkeys(found), info.name)

    def _readers(self, name: str, fmt: Format) -> tuple[str, ...]:
        """Layers behind `name`, as far as values are beyond the format's range."""
        found: dict[str, None] = {}
        waiting = [name] if _absmax(self.layers[name]) > fmt.max else []
        while waiting:
            for tensor in self.model.layer_by_id[waiting.pop()].outputs:
                for reader in self.model.consumers.get(tensor, ()):
                    info = self.layers.get(reader.id)
                    if info is None or reader.id in found or info.format == "fp32":
                        continue
                    found[reader.id] = None
                    if _absmax(info) > fmt.max:
                        waiting.append(reader.id)
        return tuple(found)

    def _mask(self, layer: Layer, fmt: Format) -> tuple[str, ...]:
        """The layers of a mask, when it is a mask's constant that the format cannot hold."""
        if layer.op_type == "Softmax":
            producer = self.model.producers.get(layer.inputs[0])
            return (producer.id, layer.id) if producer and producer.op_type in _MASKS else ()
        beyond = any(
            np.abs(value).max(initial=0) > fmt.max
            for _, values in self._constants(layer, _MASKS)
            for value in values
        )
        return (layer.id,) if beyond and self._feeds_softmax(layer) else ()

    def _feeds_softmax(self, layer: Layer) -> bool:
        near = [layer]
        for _ in range(_FAR):
            near = [r for x in near for name in x.outputs for r in self.model.consumers.get(name, ())]
            if any(x.op_type == "Softmax" for x in near):
                return True
            near = [x for x in near if x.op_type in _MASKS]
        return False

    def _vanished(self, layer: Layer, fmt: Format) -> tuple[str, ...]:
        """Layers from the one whose constant becomes 0 (or 1) in the format, to this one."""
        for path, values in self._constants(layer, _SHIFTS | {"Sqrt", "Abs"}):
            if path[0].op_type in _SHIFTS and any(_vanishes(value, fmt) for value in values):
                return tuple(x.id for x in path)
        return ()

    def _constants(
        self, layer: Layer, through: frozenset[str]
    ) -> Iterator[tuple[Sequence[Layer], list[np.ndarray]]]:
        """Single-valued float constants that the layer and those before it read, and the path from there."""
        paths: list[tuple[Layer, ...]] = [(layer,)]
        for _ in range(_FAR):
            for path in paths:
                values = [self.model.constant(name) for name in path[0].inputs if name]
                yield (
                    path,
                    [np.asarray(v) for v in values if v is not None and v.dtype.kind == "f" and v.size == 1],
                )
            heads = [
                (self.model.producers[name], *path)
                for path in paths
                for name in path[0].inputs
                if name in self.model.producers and name in self.model.value_dependent
            ]
            paths = [path for path in heads if path[0].op_type in through]


def overflow_kind(layer: LayerInfo) -> str:
    """Name of an overflow, from what the layer is for."""
    if layer.role == "norm" and layer.op_type in _SQUARES:
        return "norm-square-overflow"
    if layer.role == "attn_mask":
        return "mask-constant"
    if layer.op_type in ("Exp", "Log", "Softplus"):
        return "exp-log-domain"
    if layer.op_type.startswith("Reduce") or layer.op_type == "GlobalAveragePool":
        return "reduction-accumulation"
    return "activation-overflow"


def _absmax(info: LayerInfo) -> float:
    return info.accumulated.get("reference_absmax", 0.0)


def _vanishes(value: np.ndarray, fmt: Format) -> bool:
    """Whether a constant that is not 0 becomes 0, or one that is not 1 becomes 1."""
    exact = value.astype(np.float32).reshape(-1)
    rounded = round_to(exact, fmt)
    return bool((((exact != 0) & (rounded == 0)) | ((exact != 1) & (rounded == 1))).any())
