"""Which layers a plan may lower, and which of them have operands that TensorRT quantizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import TensorProto

from diag.model.graph import LINEAR_OPS, MATRIX_OPS, Layer, Model, TensorInfo
from diag.model.shapes import infer

_SUBGRAPH_OPS = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_QUANTIZER_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})

INDEX_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "OneHot": (0, 1),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
"""Operand positions that hold shapes, indices, counts or axes. Their values must be exact."""


@dataclass(frozen=True)
class FloatLayers:
    """The layers that a plan may lower, and what can be done with each."""

    ids: tuple[str, ...]
    """All of them, in graph order."""
    fed: frozenset[str]
    """Those that read a floating-point tensor, where Q/DQ can stand."""
    operand: frozenset[str]
    """Those that an operand format means as a default."""
    weighted: frozenset[str]
    """Those of `operand` with a constant operand."""
    blocked: frozenset[str]
    """Those of `weighted` that a block format means: MatMul and Gemm with the weights on the right."""


def float_layers(model: Model, tensors: Mapping[str, TensorInfo] | None = None) -> FloatLayers:
    """Layers that compute on floating-point values which depend on the model's inputs.

    Left out, and so never lowered: constants and what is folded from them, shape and index arithmetic,
    If, Loop and Scan, whose bodies are not rewritten, and quantizers that the model brings. `tensors` is
    `diag.model.shapes.infer(model)`, done here when it is not given.
    """
    floats = float_tensors(model, infer(model) if tensors is None else tensors)
    index = index_layers(model, floats)
    found = [layer for layer in model.layers if layer.id not in index and _lowerable(model, layer, floats)]
    operand = [layer for layer in found if layer.op_type in LINEAR_OPS and not layer.domain]
    weighted = [layer for layer in operand if _constant_operand(model, layer)]
    return FloatLayers(
        tuple(layer.id for layer in found),
        frozenset(layer.id for layer in found if not floats.isdisjoint(layer.reads)),
        frozenset(layer.id for layer in operand),
        frozenset(layer.id for layer in weighted),
        frozenset(layer.id for layer in weighted if _weights_on_the_right(model, layer)),
    )


def _lowerable(model: Model, layer: Layer, floats: frozenset[str]) -> bool:
    if layer.op_type in _SUBGRAPH_OPS | _QUANTIZER_OPS and not layer.domain:
        return False
    dependent = not model.value_dependent.isdisjoint(layer.outputs)
    return dependent and not floats.isdisjoint((*layer.reads, *layer.outputs))


def _constant_operand(model: Model, layer: Layer) -> bool:
    return any(name and name not in model.value_dependent for name in layer.inputs[:2])


def _weights_on_the_right(model: Model, layer: Layer) -> bool:
    return layer.op_type in MATRIX_OPS and layer.inputs[1] not in model.value_dependent


def float_tensors(model: Model, tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Names of floating-point tensors; where inference is silent, float in means float out."""
    floats = {name for name, info in tensors.items() if info.is_float}
    silent = {name for name, info in tensors.items() if info.elem_type == TensorProto.UNDEFINED}
    for layer in model.layers:
        unknown = [o for o in layer.outputs if o and (o not in tensors or o in silent)]
        if unknown and not floats.isdisjoint(layer.reads):
            floats.update(unknown)
    return frozenset(floats)


def index_layers(model: Model, floats: frozenset[str]) -> frozenset[str]:
    """Layers that compute nothing but shapes, indices and counts, though from the inputs' values.

    Followed backwards from the operands that need exact integers: through integer layers, through a Cast
    to integer, and then through float layers that nothing else reads. Any other layer that makes integers
    out of floats (ArgMax, a comparison) is a decision about values, and ends the walk.
    """
    wanted: set[str] = set()
    found: set[str] = set()
    for layer in reversed(model.layers):
        wanted.update(_index_operands(layer))
        if wanted.isdisjoint(layer.outputs):
            continue
        if floats.isdisjoint(layer.outputs):
            if layer.op_type == "Cast" or floats.isdisjoint(layer.reads):
                found.add(layer.id)
                wanted.update(layer.reads)
        elif all(_only_index(model, name, found) for name in layer.outputs if name):
            found.add(layer.id)
            wanted.update(layer.reads)
    return frozenset(found)


def _index_operands(layer: Layer) -> Iterator[str]:
    for position in INDEX_INPUTS.get(layer.op_type, ()):
        if position < len(layer.inputs) and layer.inputs[position]:
            yield layer.inputs[position]


def _only_index(model: Model, name: str, found: set[str]) -> bool:
    """Whether every reader of a float tensor takes it as an index or is index arithmetic itself."""
    if name in model.outputs:
        return False
    return all(
        reader.id in found or set(_positions(reader, name)) <= set(INDEX_INPUTS.get(reader.op_type, ()))
        for reader in model.consumers.get(name, ())
    )


def _positions(layer: Layer, name: str) -> Iterator[int]:
    """Operand positions at which a layer reads a tensor; -1 when a subgraph of it does."""
    yield from (position for position, operand in enumerate(layer.inputs) if operand == name)
    if name in layer.captured:
        yield -1
