"""Why values of a layer are lost, and which layers must move together so that they are not.

A pin on the layer alone seldom helps: what it writes in FP32 is cast back to the narrow format for the next
layer. So the pins go on until the values fit again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diag.lint.walks import (
    MASKS,
    SHIFTS,
    becomes_one,
    becomes_zero,
    constants_before,
    feeds_softmax,
    overflow_kind,
)
from diag.model.graph import Layer, Model
from diag.numerics.formats import FORMATS, Format
from diag.report.schema import LayerInfo

_DIVIDES = frozenset({"Div", "Reciprocal", "Log", "Sqrt", "Pow"})

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
        return Cause(
            overflow_kind(info.role, info.op_type), (info.name,), (info.name, *self._readers(info.name, fmt))
        )

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
            return (producer.id, layer.id) if producer and producer.op_type in MASKS else ()
        beyond = any(
            np.abs(value).max(initial=0) > fmt.max
            for _, values in constants_before(self.model, layer, MASKS, _FAR)
            for value in values
        )
        return (layer.id,) if beyond and feeds_softmax(self.model, layer, _FAR) else ()

    def _vanished(self, layer: Layer, fmt: Format) -> tuple[str, ...]:
        """Layers from the one whose constant becomes 0 (or 1) in the format, to this one."""
        for path, values in constants_before(self.model, layer, SHIFTS | {"Sqrt", "Abs"}, _FAR):
            if path[0].op_type in SHIFTS and any(_vanishes(value, fmt) for value in values):
                return tuple(x.id for x in path)
        return ()


def _absmax(info: LayerInfo) -> float:
    return info.accumulated.get("reference_absmax", 0.0)


def _vanishes(value: np.ndarray, fmt: Format) -> bool:
    """Whether a constant that is not 0 becomes 0, or one that is not 1 becomes 1."""
    return becomes_zero(value, fmt) or becomes_one(value, fmt)
