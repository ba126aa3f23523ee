"""Pass: activation quantizers in front of what only moves values: reshapes, transposes, pooling, Concats.

Requires: Q/DQ inserted; equal scales where one quantizer is to serve several tensors.
Ensures: the same numbers, bit for bit; each pair stands right behind the operator that makes its values, so
that an engine fuses it there, and what lies between it and the quantized layer moves INT8 or FP8. A pair
moves only if nothing but quantizers of its scale and type reads the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, numpy_helper

from diag.model.graph import captured_names, free_name
from diag.typed.fused import carried
from diag.typed.surgeon import NAMESPACE

Key = tuple[bytes, int, int]
"""Value of the scale, its type, and the type of the codes."""


def move_quantizers(proto: ModelProto) -> ModelProto:
    """A copy of a typed model with the quantizers that the rewrite inserted moved forward in the graph."""
    moved = ModelProto()
    moved.CopyFrom(proto)
    del moved.graph.value_info[:]
    mover = _Mover(moved)
    for node in reversed(mover.nodes):
        mover.pass_through(node)
    ordered = [NodeProto.FromString(node.SerializeToString()) for node in mover.ordered()]
    del moved.graph.node[:]
    moved.graph.node.extend(ordered)
    return moved


@dataclass(frozen=True)
class _Pair:
    quantize: NodeProto
    dequantize: NodeProto

    @property
    def values(self) -> str:
        return str(self.dequantize.output[0])


class _Mover:
    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._kept = {value.name for value in graph.output}
        self._kept |= {name for node in graph.node for name in captured_names(node)}
        self._taken = {name for node in graph.node for name in (node.name, *node.output)}
        self._inputs = [value.name for value in graph.input]
        self._pairs: dict[str, dict[Key, _Pair]] = defaultdict(dict)
        inserted = self._collect(list(graph.node))
        self.nodes = [node for node in graph.node if node.name not in inserted]
        self._readers: dict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
        for node in self.nodes:
            for index, name in enumerate(node.input):
                self._readers[name].append((node, index))

    def _collect(self, nodes: list[NodeProto]) -> set[str]:
        """Names of the nodes of all pairs that the rewrite inserted on activations."""
        readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in nodes:
            for name in node.input:
                readers[name].append(node)
        found: set[str] = set()
        for node in nodes:
            behind = readers[node.output[0]] if self._per_tensor(node) else []
            if [n.op_type for n in behind] == ["DequantizeLinear"]:
                self._pairs[node.input[0]][self._key(node)] = _Pair(node, behind[0])
                found |= {node.name, behind[0].name}
        return found

    def _per_tensor(self, node: NodeProto) -> bool:
        """Whether it is a quantizer of ours with one constant scale."""
        ours = node.op_type == "QuantizeLinear" and node.name.startswith(f"{NAMESPACE}/")
        parameters = [self._constants.get(name) for name in node.input[1:]]
        return ours and len(parameters) == 2 and all(p is not None and not p.dims for p in parameters)

    def _key(self, node: NodeProto) -> Key:
        scale, zero = (self._constants[name] for name in node.input[1:3])
        return numpy_helper.to_array(scale).tobytes(), scale.data_type, zero.data_type

    def pass_through(self, node: NodeProto) -> None:
        """Put the quantizers behind a node that only moves values in front of it, where that is the same."""
        sources = carried(node.op_type, node.input) if not node.domain else ()
        made, pairs = node.output[0], self._pairs.get(node.output[0], {})
        alone = len(pairs) == 1 and not self._readers[made] and made not in self._kept
        if not sources or not alone or not self._constants.keys().isdisjoint(sources):
            return
        if any(name in self._kept or self._readers[name] for name in node.output[1:]):
            return  # a pooling's indices
        ((key, pair),) = self._pairs.pop(made).items()
        for reader, index in self._readers.pop(pair.values):
            reader.input[index] = made
            self._readers[made].append((reader, index))
        for index, source in enumerate(sources):
            before = self._pairs[source].setdefault(key, self._copied(pair, source))
            self._readers[source].remove((node, index))
            node.input[index] = before.values
            self._readers[before.values].append((node, index))

    def _copied(self, pair: _Pair, source: str) -> _Pair:
        quantize, dequantize = NodeProto(), NodeProto()
        quantize.CopyFrom(pair.quantize)
        dequantize.CopyFrom(pair.dequantize)
        label = self._fresh(f"{source}/moved")
        quantize.name, dequantize.name = (
            f"{NAMESPACE}/{part}/{label}" for part in ("quantize", "dequantize")
        )
        quantize.input[0], quantize.output[0] = source, label
        dequantize.input[0], dequantize.output[0] = label, self._fresh(f"{label}/dequantized")
        return _Pair(quantize, dequantize)

    def _fresh(self, name: str) -> str:
        found = free_name(name, self._taken)
        self._taken.add(found)
        return found

    def ordered(self) -> list[NodeProto]:
        """The nodes, each pair right behind the node that makes its values."""
        found: list[NodeProto] = []
        for name in self._inputs:
            self._add_pairs(name, found)
        for node in self.nodes:
            found.append(node)
            for name in node.output:
                self._add_pairs(name, found)
        return found

    def _add_pairs(self, name: str, found: list[NodeProto]) -> None:
        for pair in self._pairs.get(name, {}).values():
            found.extend((pair.quantize, pair.dequantize))
