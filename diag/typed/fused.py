"""What a fused placement makes of operands: which input of an Add stays float, which scales must be one.

The rules are those of NVIDIA's Working with Quantized Types: an Add is fused into the convolution or product
in front of it, and a Concat, a pooling or a reshape moves INT8 only where the scales on its sides are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from diag.model.fusion import fused_source
from diag.model.graph import LINEAR_OPS, Layer, Model
from diag.numerics.formats import FORMATS
from diag.typed.operands import Operand

MOST_WIDENING = 4.0
"""A common scale may cost an integer tensor's other readers two bits (12 dB); beyond that a second copy of
the tensor is the smaller harm. FP8 has steps that grow with the value, and loses nothing."""

Scales = Mapping[str, Mapping[str, float]]
"""Step of each activation: by format (a tensor may be read in two), then by tensor name."""

ONE_INPUT = frozenset({"Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only move or select the values of their first input: quantizing before or behind them is the
same, bit for bit."""


def without_fused(model: Model, operands: Iterable[Operand], formats: Collection[str]) -> tuple[Operand, ...]:
    """`operands` without the inputs of Adds that come straight out of a quantized layer.

    TensorRT computes that layer and the Add in one kernel; a quantizer between them would keep them apart.
    `formats` has the quantized layers.
    """
    adds = {o.layer for o in operands if model.layer_by_id[o.layer].op_type == "Add"}
    within = {add: _fused_input(model, model.layer_by_id[add], formats) for add in adds}
    return tuple(o for o in operands if o.layer not in within or o.input != within[o.layer])


def _fused_input(model: Model, add: Layer, formats: Collection[str]) -> int | None:
    """Of two inputs that quantized layers make, the one that is computed last is fused."""
    found = ((index, fused_source(model, name, LINEAR_OPS)) for index, name in enumerate(add.inputs[:2]))
    sources = {index: layer.index for index, layer in found if layer is not None and layer.id in formats}
    return max(sources, key=lambda index: sources[index]) if sources else None


def common_scales(model: Model, operands: Iterable[tuple[Operand, str]], scales: Scales) -> Scales:
    """`scales` with one step, the widest, for all tensors that one quantizer in front of them can serve.

    `operands` come with their formats. Tensors are joined when the same values reach them through moves,
    pooling and Concats that nothing but quantizers of the format reads. One whose step would grow beyond
    `MOST_WIDENING` keeps its own, and so a quantizer of its own.
    """
    found = {fmt: dict(steps) for fmt, steps in scales.items()}
    for fmt, steps in found.items():
        reads = {(o.layer, o.tensor) for o, its in operands if its == fmt and o.weight is None}
        names = dict.fromkeys(tensor for _, tensor in sorted(reads) if tensor in steps)
        for group in _groups({name: set(_origins(model, name, reads)) for name in names}):
            widest = max(steps[name] for name in group)
            most = math.inf if FORMATS[fmt].unit_roundoff else MOST_WIDENING
            steps.update({name: widest for name in group if widest <= most * steps[name]})
    return found


Reads = Collection[tuple[str, str]]
"""Layers and the tensors that they read through a quantizer."""


def _origins(model: Model, name: str, reads: Reads) -> Iterator[str]:
    """Where the quantizers of a tensor can stand: itself, or in front of what only moves its values."""
    layer = model.producers.get(name)
    sources = carried(layer.op_type, layer.inputs) if layer is not None and not layer.domain else ()
    if not sources or not model.value_dependent.issuperset(sources) or not _moves(model, name, reads):
        yield name
        return
    for source in sources:
        yield from _origins(model, source, reads)


def carried(op_type: str, inputs: Iterable[str]) -> tuple[str, ...]:
    """The inputs whose values an operator hands on unchanged; empty when it computes."""
    if op_type == "Concat":
        return tuple(inputs)
    return tuple(inputs)[:1] if op_type in ONE_INPUT else ()


def _moves(model: Model, name: str, reads: Reads) -> bool:
    """Whether nothing but quantizers reads the tensor, behind further moves too."""
    readers = model.consumers.get(name, ())
    return name not in model.outputs and bool(readers) and all(_stays(model, r, name, reads) for r in readers)


def _stays(model: Model, reader: Layer, name: str, reads: Reads) -> bool:
    if (reader.id, name) in reads:
        return True
    carries = not reader.domain and name in carried(reader.op_type, reader.inputs)
    return carries and _moves(model, reader.outputs[0], reads)


def _groups(origins: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Names that share an origin, directly or by way of others."""
    groups: list[tuple[set[str], set[str]]] = []
    for name, found in origins.items():
        touched = [group for group in groups if group[1] & found]
        groups = [group for group in groups if group not in touched]
        names, sources = {name}.union(*(g[0] for g in touched)), found.union(*(g[1] for g in touched))
        groups.append((names, sources))
    yield from (names for names, _ in groups)
