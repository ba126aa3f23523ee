"""Layers that must change precision together, found from the graph.

Four kinds, each for a reason of its own:

- `norm`: the parts of one normalisation. TensorRT fuses them into one kernel with one type, so a pin on
  one of them either moves all or is lost in the fusion.
- `shared_input`: MatMul, Gemm or Conv layers with weights that read one tensor: the Q, K and V
  projections, the gate and up projections. One activation quantizer feeds them all, and TensorRT merges
  them into one wide product, which cannot run in two formats.
- `add_inputs`: the two inputs of an Add of activations. They move together when the Add itself is
  quantized; they are tensors, not layers, so a pin on one of the layers that write them forces nothing.
- `concat_inputs`: the inputs of a Concat, likewise; quantized, they share one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from diag.model.graph import Layer, Model
from diag.plan.layers import FloatLayers, float_layers

GroupKind = Literal["norm", "shared_input", "add_inputs", "concat_inputs"]

# One reads the same values behind these, so that one quantizer serves both sides.
_SAME_VALUES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


@dataclass(frozen=True)
class Group:
    """Layers (and, for Add and Concat, the tensors they read) that change precision together.

    `format` and `moved_by` are filled by `resolve`: the format the group got, and the pin that gave it.
    """

    kind: GroupKind
    layers: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    format: str = ""
    moved_by: str = ""


def find_groups(
    model: Model,
    norm_parts: Iterable[frozenset[str]],
    blocks: Mapping[str, int | None] | None = None,
    floats: FloatLayers | None = None,
) -> tuple[Group, ...]:
    """All groups of the model, by kind and then in graph order.

    `norm_parts` are the layers of each normalisation; those of a single layer need no group. With
    `blocks`, layers of different blocks that share an input (cross-attention reads one tensor in every
    block) are groups of their own. `floats` is `float_layers(model)`, done here when it is not given.
    """
    given = float_layers(model) if floats is None else floats
    return (
        *_norms(model, norm_parts, given),
        *_shared_inputs(model, blocks or {}, given),
        *_joins(model, given),
    )


def _norms(model: Model, parts: Iterable[frozenset[str]], floats: FloatLayers) -> Iterator[Group]:
    position = {layer.id: layer.index for layer in model.layers}
    allowed = frozenset(floats.ids)
    found = [tuple(sorted(part & allowed, key=position.__getitem__)) for part in parts]
    for layers in sorted((part for part in found if len(part) > 1), key=lambda part: position[part[0]]):
        yield Group("norm", layers)


def _shared_inputs(model: Model, blocks: Mapping[str, int | None], floats: FloatLayers) -> Iterator[Group]:
    found: dict[tuple[str, str, str, int | None], list[Layer]] = {}
    for layer in model.layers:
        if layer.id in floats.weighted and layer.inputs[0] in model.value_dependent:
            source = _source(model, layer.inputs[0])
            key = (source, layer.op_type, _settings(layer), blocks.get(layer.id))
            found.setdefault(key, []).append(layer)
    for key, layers in found.items():
        if len(layers) > 1:
            yield Group("shared_input", tuple(layer.id for layer in layers), (key[0],))


def _settings(layer: Layer) -> str:
    """Attributes that merged layers must share: a 1x1 and a 3x3 convolution are not merged."""
    return repr(sorted(layer.attributes.items()))


def _source(model: Model, name: str) -> str:
    """The tensor in front of the reshapes before `name`."""
    while (writer := model.producers.get(name)) is not None and writer.op_type in _SAME_VALUES:
        name = writer.inputs[0]
    return name


def _joins(model: Model, floats: FloatLayers) -> Iterator[Group]:
    allowed = frozenset(floats.ids)
    for layer in model.layers:
        if layer.id in allowed and layer.op_type in ("Add", "Concat") and not layer.domain:
            tensors = tuple(dict.fromkeys(n for n in layer.inputs if n in model.value_dependent))
            if len(tensors) > 1:
                yield Group("add_inputs" if layer.op_type == "Add" else "concat_inputs", (layer.id,), tensors)
