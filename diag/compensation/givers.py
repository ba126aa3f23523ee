"""The walk from an activation back to the constants that scale its channels.

It goes through operators that commute with a positive factor for each channel, and only along tensors that
nothing else reads. That the result is exact is proven by the outputs of the edited model, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.model.graph import MATRIX_OPS, SHAPE_OF_VALUES, Layer, Model, TensorInfo
from diag.typed.operands import weight_axis

_HOMOGENEOUS = frozenset({"Identity", "Relu", "LeakyRelu", "Dropout", "Cast"})
"""f(s x) = s f(x) for s > 0, element by element."""

_VIEWS = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity", "Cast"})
"""Between a V projection and its MatMul with the probabilities; Expand repeats heads (grouped queries)."""


@dataclass(frozen=True)
class Giver:
    """A constant that takes the division of channels."""

    layer: str
    input: int
    axis: int
    """Axis of the channels; -1 too for a single number, which becomes a vector."""
    divides: bool = False
    """Whether the layer divides by the constant: then it is multiplied instead."""


@dataclass(frozen=True)
class Path:
    """What a walk found."""

    givers: tuple[Giver, ...]
    touched: frozenset[str]
    ties: NDArray[np.intp] | None = None


def walk_back(model: Model, tensor: str, channels: int, types: Mapping[str, TensorInfo]) -> Path | None:
    """Constants in front of `tensor` that can divide its channels (last axis); None: there are none."""
    found = _Walk(model, channels).back(tensor)
    if found is not None:
        return found
    return _through_attention(model, tensor, channels, types)


@dataclass(frozen=True)
class _Walk:
    model: Model
    channels: int

    def back(self, tensor: str) -> Path | None:
        layer = self.model.producers.get(tensor)
        if layer is None or layer.domain or tensor not in self.model.value_dependent:
            return None
        found = self._through(layer)
        return None if found is None else Path(found.givers, found.touched | {tensor})

    def _through(self, layer: Layer) -> Path | None:
        if layer.op_type == "LayerNormalization":
            return self._norm(layer)
        if layer.op_type in MATRIX_OPS:
            return self._linear(layer)
        if layer.op_type in _HOMOGENEOUS:
            return self._only(layer.inputs[0], layer)
        if layer.op_type in ("Mul", "Div"):
            return self._factor(layer)
        if layer.op_type in ("Add", "Sub"):
            return self._shift(layer)
        return None

    def _norm(self, layer: Layer) -> Path | None:
        """The operator's own scale and shift."""
        if layer.attributes.get("axis", -1) != -1:
            return None
        given = [i for i in (1, 2) if i < len(layer.inputs) and layer.inputs[i]]
        if not all(self._is_vector(layer.inputs[i]) for i in given):
            return None
        return Path(tuple(Giver(layer.id, i, -1) for i in given), frozenset())

    def _linear(self, layer: Layer) -> Path | None:
        weight = self.model.constant(layer.inputs[1])
        if weight is None or weight.ndim != 2 or weight.dtype != np.float32:
            return None
        axis = weight_axis(layer, 1, 2)
        if weight.shape[axis] != self.channels:
            return None
        givers = [Giver(layer.id, 1, axis)]
        if len(layer.inputs) > 2 and layer.inputs[2]:
            if not self._is_vector(layer.inputs[2]):
                return None
            givers.append(Giver(layer.id, 2, -1))
        return Path(tuple(givers), frozenset())

    def _factor(self, layer: Layer) -> Path | None:
        """x * c and x / c take it in c; of x * y one side is enough."""
        for index in (1, 0):
            if self._is_vector(layer.inputs[index]):
                divides = layer.op_type == "Div"
                if divides and index == 0:
                    break
                return Path((Giver(layer.id, index, -1, divides),), frozenset())
        sides = layer.inputs[:1] if layer.op_type == "Div" else layer.inputs
        for name in reversed(sides):
            found = self._only(name, layer)
            if found is not None:
                return found
        return None

    def _shift(self, layer: Layer) -> Path | None:
        """x + c: both sides take it."""
        for index in (0, 1):
            if self._is_vector(layer.inputs[index]):
                before = self._only(layer.inputs[1 - index], layer)
                if before is None:
                    return None
                return Path((*before.givers, Giver(layer.id, index, -1)), before.touched)
        return None

    def _only(self, name: str, reader: Layer) -> Path | None:
        """Further back along a tensor that only `reader` reads, once."""
        return self.back(name) if _only_read(self.model, name, reader) else None

    def _is_vector(self, name: str) -> bool:
        """A constant with one number for each channel, along the last axis, or one for all."""
        value = self.model.constant(name) if name else None
        if value is None or value.dtype != np.float32:
            return False
        return value.size == 1 or (value.size == self.channels and value.shape[-1] == self.channels)


def value_readers(model: Model, name: str) -> tuple[Layer, ...]:
    """Layers that read a tensor's values; those that read its shape only take no notice of a scale."""
    return tuple(x for x in model.consumers.get(name, ()) if x.op_type not in SHAPE_OF_VALUES)


def _only_read(model: Model, name: str, reader: Layer) -> bool:
    readers = value_readers(model, name)
    if name in model.outputs or len(readers) != 1:
        return False
    return readers[0].id == reader.id and reader.inputs.count(name) == 1 and name not in reader.captured


def _through_attention(
    model: Model, tensor: str, channels: int, types: Mapping[str, TensorInfo]
) -> Path | None:
    """From the heads' joined output through the MatMul with the probabilities to the V projection."""
    name, touched = _through_views(model, tensor, None)
    product = model.producers.get(name)
    if product is None or product.op_type != "MatMul" or name == tensor or product.domain:
        return None
    if any(side not in model.value_dependent for side in product.inputs):
        return None
    if not _only_read(model, product.inputs[1], product):
        return None
    value, passed = _through_views(model, product.inputs[1], product)
    width = _width(model, value)
    if width is None or channels % width:
        return None
    found = _Walk(model, width).back(value)
    ties = _heads(types, name, channels, width)
    if found is None or ties is None:
        return None
    return Path(found.givers, found.touched | touched | passed, ties if width != channels else None)


def _through_views(model: Model, name: str, reader: Layer | None) -> tuple[str, frozenset[str]]:
    """Back through views, each read by one layer only; the tensor before them, and those passed."""
    passed = {name}
    layer = model.producers.get(name)
    while layer is not None and layer.op_type in _VIEWS and not layer.domain:
        if not _only_read(model, layer.inputs[0], layer):
            break
        name = layer.inputs[0]
        passed.add(name)
        layer = model.producers.get(name)
    return name, frozenset(passed)


def _width(model: Model, name: str) -> int | None:
    """Output channels of the projection behind a tensor, seen through an added constant."""
    layer = model.producers.get(name)
    if layer is not None and layer.op_type == "Add":
        inner = [side for side in layer.inputs if side in model.value_dependent]
        layer = model.producers.get(inner[0]) if len(inner) == 1 else None
    if layer is None or layer.op_type not in MATRIX_OPS:
        return None
    weight = model.constant(layer.inputs[1])
    return int(weight.shape[weight_axis(layer, 1, 2)]) if weight is not None and weight.ndim == 2 else None


def _heads(
    types: Mapping[str, TensorInfo], product: str, channels: int, width: int
) -> NDArray[np.intp] | None:
    """V channel of each channel of the joined heads: consecutive heads of queries share one of V."""
    if width == channels:
        return np.arange(channels)
    info = types.get(product)
    depth = info.shape[-1] if info is not None and info.shape else None
    if not isinstance(depth, int) or width % depth or channels % depth:
        return None
    heads, shared = np.arange(channels) // depth, channels // width
    return np.asarray((heads // shared) * depth + np.arange(channels) % depth)
