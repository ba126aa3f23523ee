"""The float model underneath a Q/DQ model: every quantizer taken out.

Requires: constant scales and zero points, quantizers in the main graph only. Ensures: the same node names,
the same inputs and outputs; a weight that the model holds in float stays as it is, one that it holds as codes
takes the values that these mean. Where ONNX Runtime's quantizer took a Relu out, because the zero point
does its work, a Relu stands again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from diag.errors import ModelError
from diag.model.graph import Model, subgraphs
from diag.model.load import drop_unused, initializer
from diag.typed.brought import DEQUANTIZE, INTEGER_OPS, QUANTIZE, Quantizer, dequantized
from diag.typed.operands import REARRANGES

_NEVER_NEGATIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Softplus"})
_KEEPS_SIGN = REARRANGES | {QUANTIZE, DEQUANTIZE, "MaxPool", "AveragePool", "GlobalAveragePool"}


@dataclass(frozen=True)
class Stripped:
    """A model without its quantizers."""

    proto: ModelProto
    weights: dict[str, NDArray[np.generic]]
    names: Mapping[str, str]
    """Tensors of the Q/DQ model that are called otherwise here: dequantized ones, and renamed outputs."""
    relus: tuple[str, ...]
    """Nodes that stand for zero points which cut off negative values."""


def strip_quantizers(
    model: Model, quantizers: Sequence[Quantizer], carried: Collection[str] = ()
) -> Stripped:
    """Take every quantizer out. Where the dequantized tensor is among `carried`, an Identity of the
    DequantizeLinear's name stays in its place: a layer that a plan can quantize.

    Raises ModelError when a quantizer cannot be taken out: its codes are used by other operators, its scale
    is computed, or it stands in the body of an If, Loop or Scan.
    """
    _refuse(model, quantizers)
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    weights = dict(model.weights)
    for quantizer in quantizers:
        if quantizer.kind == "stored":
            stored = initializer(quantizer.output, _values(model, quantizer), weights)
            proto.graph.initializer.append(stored)
    sources = {q.output: q.source for q in quantizers if q.kind != "stored"}
    relus = _put_back_relus(model, quantizers, sources)
    carriers = {name: sources.pop(name) for name in carried}
    kept = []
    for node in proto.graph.node:
        if node.op_type not in (QUANTIZE, DEQUANTIZE):
            kept.append(node)
        elif node.output[0] in carriers:
            source = _end(carriers[node.output[0]], sources)
            kept.append(onnx.helper.make_node("Identity", [source], [node.output[0]], node.name))
        kept += [relus[name] for name in node.output if name in relus]
    names = {output: _end(output, sources) for output in sources}
    aliases = _rename_outputs(proto, names, kept)
    for node in kept:
        _rewire(node, names)
    del proto.graph.node[:]
    proto.graph.node.extend([*kept, *aliases])
    _drop_unused(proto, weights)
    return Stripped(proto, weights, names, tuple(node.name for node in relus.values()))


def _refuse(model: Model, quantizers: Sequence[Quantizer]) -> None:
    for layer in model.layers:
        if layer.op_type in INTEGER_OPS:
            raise ModelError(
                f"layer {layer.id!r} ({layer.op_type}) computes on codes, which TensorRT does not read",
                "Quantize to Q/DQ: quantize_static with quant_format=QuantFormat.QDQ.",
            )
    pairs = {q.quantize for q in quantizers}
    for layer in model.layers:
        if layer.op_type != QUANTIZE:
            continue
        readers = model.consumers.get(layer.outputs[0], ())
        if layer.id not in pairs or any(r.op_type != DEQUANTIZE for r in readers):
            raise ModelError(
                f"the codes of quantizer {layer.id!r} are read by more than a DequantizeLinear",
                "Only Q/DQ pairs can be taken out.",
            )
    if any(_quantizes(graph) for node in model.proto.graph.node for graph in subgraphs(node)):
        raise ModelError("quantizers stand in the body of an If, Loop or Scan", "They cannot be taken out.")
    computed = [q.layer for q in quantizers if q.scale is None or q.zero_point is None]
    if computed:
        raise ModelError(f"the scale of {computed[0]!r} is computed", "Only constant scales can be read.")


def _quantizes(graph: onnx.GraphProto) -> bool:
    inner = (inside for node in graph.node for inside in subgraphs(node))
    return any(node.op_type in (QUANTIZE, DEQUANTIZE) for node in graph.node) or any(map(_quantizes, inner))


def _values(model: Model, quantizer: Quantizer) -> NDArray[np.float32]:
    codes = model.constant(quantizer.source)
    if codes is None:
        raise ModelError(
            f"{quantizer.layer!r} reads codes that no QuantizeLinear writes", "Only Q/DQ pairs can be read."
        )
    try:
        return dequantized(codes, quantizer)
    except ValueError as error:
        raise ModelError(f"the scale of {quantizer.layer!r} does not fit its codes: {error}") from error


def _put_back_relus(
    model: Model, quantizers: Sequence[Quantizer], sources: dict[str, str]
) -> dict[str, NodeProto]:
    """By the tensor that it rectifies, a Relu for each zero point that may cut off negative values."""
    relus: dict[str, NodeProto] = {}
    for quantizer in quantizers:
        name = quantizer.source
        if not quantizer.rectifies or name in model.inputs or _never_negative(model, name):
            continue
        if name not in relus:
            relus[name] = onnx.helper.make_node("Relu", [name], [f"{name}/relu"], f"trtdiag/relu/{name}")
        sources[quantizer.output] = f"{name}/relu"
    return relus


def _never_negative(model: Model, name: str) -> bool:
    """Whether what writes a tensor leaves nothing below 0, seen through quantizers and rearrangements."""
    layer = model.producers.get(name)
    while layer is not None and layer.op_type in _KEEPS_SIGN:
        layer = model.producers.get(layer.inputs[0])
    return layer is None or layer.op_type in _NEVER_NEGATIVE


def _end(name: str, sources: Mapping[str, str]) -> str:
    """The float tensor at the beginning of a chain of quantizers."""
    while name in sources:
        name = sources[name]
    return name


def _rename_outputs(proto: ModelProto, names: dict[str, str], nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Where a graph's output was a dequantized tensor, its source takes the name, or an Identity gives it."""
    outputs = [value.name for value in proto.graph.output]
    written = {name for node in nodes for name in node.output}
    aliases = []
    for output in outputs:
        if output not in names:
            continue
        source = names.pop(output)
        if source in written and source not in outputs and source not in names:
            names |= {name: output for name, end in names.items() if end == source} | {source: output}
        else:
            label = f"trtdiag/alias/{output}"
            aliases.append(onnx.helper.make_node("Identity", [names.get(source, source)], [output], label))
    return aliases


def _rewire(node: NodeProto, names: Mapping[str, str]) -> None:
    """Read and write tensors by their new names, in the node's subgraphs too."""
    for names_of in (node.input, node.output):
        for index, name in enumerate(names_of):
            if name in names:
                names_of[index] = names[name]
    for graph in subgraphs(node):
        for inner in graph.node:
            _rewire(inner, names)


def _drop_unused(proto: ModelProto, weights: dict[str, NDArray[np.generic]]) -> None:
    """Remove scales and codes that nothing reads any more, and shapes of tensors that are gone."""
    read = drop_unused(proto, weights)
    for node in [n for n in proto.graph.node if n.op_type == "Constant" and n.output[0] not in read]:
        proto.graph.node.remove(node)
    del proto.graph.value_info[:]
