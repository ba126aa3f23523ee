"""Where a scale can move from an activation into constants, so that the model computes the same in FP32.

A site is the input of linear layers. Each of its channels may be divided by a number if the constants that
make the tensor take the division, and the weights that it meets the multiplication: SmoothQuant's migration.
Where another layer reads the tensor too, as a residual Add behind a norm does, nothing may be divided in
front; then a Mul on the way to the linear layers is the only place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diag.compensation.givers import Giver, Path, value_readers, walk_back
from diag.model.graph import MATRIX_OPS, Layer, Model, TensorInfo
from diag.typed.operands import weight_axis


@dataclass(frozen=True)
class Taker:
    """A linear layer that reads a site's tensor and has a constant weight."""

    layer: str
    weight: int
    """Which input the weight is."""
    axis: int
    """Axis of the weight along which it is summed over the site's channels."""


@dataclass(frozen=True)
class Site:
    """One activation whose channels can be scaled."""

    tensor: str
    channels: int
    takers: tuple[Taker, ...]
    givers: tuple[Giver, ...] = ()
    """Constants in front; none: a Mul must be inserted."""
    touched: frozenset[str] = frozenset()
    """Tensors whose values change with the scale, the site's own among them."""
    ties: NDArray[np.intp] | None = field(default=None, compare=False)
    """Class of each channel, where channels share a constant and must be scaled alike."""

    @property
    def folds(self) -> bool:
        """Whether the scale goes into constants that are there."""
        return bool(self.givers)


def find_sites(model: Model, quantized: Sequence[str], types: Mapping[str, TensorInfo]) -> tuple[Site, ...]:
    """Sites in graph order: activations among `quantized` that linear layers with constant weights read."""
    found = []
    for tensor in dict.fromkeys(quantized):
        readers = value_readers(model, tensor)
        takers = tuple(t for layer in readers if (t := _taker(model, layer, tensor)) is not None)
        sizes = {_size(model, taker) for taker in takers}
        if len(sizes) == 1:
            found.append(_site(model, tensor, sizes.pop(), takers, len(takers) == len(readers), types))
    return tuple(found)


def _site(
    model: Model,
    tensor: str,
    channels: int,
    takers: tuple[Taker, ...],
    all_take: bool,
    types: Mapping[str, TensorInfo],
) -> Site:
    path: Path | None = None
    if all_take and tensor not in model.outputs:
        path = walk_back(model, tensor, channels, types)
    if path is None:
        return Site(tensor, channels, takers)
    return Site(tensor, channels, takers, path.givers, path.touched, path.ties)


def _taker(model: Model, layer: Layer, tensor: str) -> Taker | None:
    if layer.op_type not in MATRIX_OPS or layer.domain or layer.inputs.count(tensor) != 1:
        return None
    if layer.inputs[0] != tensor or layer.attributes.get("transA", 0):
        return None
    weight = model.constant(layer.inputs[1])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None
    return Taker(layer.id, 1, 1 - weight_axis(layer, 1, 2))


def _size(model: Model, taker: Taker) -> int:
    weight = model.constant(model.layer_by_id[taker.layer].inputs[taker.weight])
    assert weight is not None
    return int(weight.shape[taker.axis])
