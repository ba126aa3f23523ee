"""ONNX GraphSurgeon as the rewriting engine: opens a model as a graph, closes it as a model again.

GraphSurgeon drops what it does not know (metadata of nodes and of the model, among it the exporter's
module paths); it is put back here, by node name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.helper import find_min_ir_version_for, np_dtype_to_tensor_dtype
from onnx_graphsurgeon.logger import G_LOGGER

from diag.model.graph import free_name
from diag.model.load import INLINE_BYTES, make_stub

G_LOGGER.severity = G_LOGGER.ERROR  # it prints to standard output, where --json belongs to the caller

NAMESPACE = "trtdiag"
"""Nodes that a rewrite adds are called `trtdiag/...`."""

FORMAT_KEY = "trtdiag.format"
"""Metadata key of a node whose format ONNX has no type for (TF32)."""

_LISTS = frozenset({AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS})

ELEM_TYPE = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
}


@dataclass
class Surgery:
    """A graph under rewriting, with the values of its large constants beside it."""

    graph: Any
    weights: dict[str, NDArray[np.generic]]
    original: ModelProto
    taken: set[str]
    """Names of tensors and nodes that are in use."""
    made: set[str] = field(default_factory=set)
    """Names of the constants that were added."""

    @classmethod
    def open(cls, proto: ModelProto, weights: Mapping[str, NDArray[np.generic]]) -> Surgery:
        """Start on a copy of `proto`; the given model is not changed."""
        copy = ModelProto()
        copy.CopyFrom(proto)
        _drop_empty_lists(copy.graph)
        return cls(gs.import_onnx(copy), dict(weights), proto, set(_names(proto.graph)))

    def fresh(self, name: str) -> str:
        """`name`, or the first of `name#2`, `name#3`, ... that no tensor and no node has."""
        found = free_name(name, self.taken)
        self.taken.add(found)
        return found

    def put_before(self, added: Mapping[str, Sequence[Any]]) -> None:
        """Put nodes in front of those that read them, by the latter's name."""
        ordered = [n for node in self.graph.nodes for n in (*added.get(node.name, ()), node)]
        self.graph.nodes.clear()
        self.graph.nodes.extend(ordered)

    def constant(self, name: str, values: NDArray[np.generic], fmt: str | None = None) -> Any:
        """A new constant; large values go to `weights`, as they do in a loaded model.

        Its type is `fmt`'s, or that of the values.
        """
        self.made.add(name)
        elem_type = ELEM_TYPE[fmt] if fmt else np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, data_type=elem_type, dims=values.shape)
        if values.nbytes > INLINE_BYTES:
            self.weights[name] = values
            make_stub(tensor)
        else:
            tensor.raw_data = _raw(values)
        data_location = int(tensor.data_location) if tensor.HasField("data_location") else None
        return gs.Constant(name, gs.ir.tensor.LazyValues(tensor), data_location=data_location)

    def close(self) -> ModelProto:
        """The rewritten model, unused nodes and constants removed, metadata restored."""
        self.graph.cleanup()
        proto: ModelProto = gs.export_onnx(self.graph, do_type_check=False)
        _move_out(proto.graph, {t.name for t in self.original.graph.initializer} | self.made)
        kept = {tensor.name for tensor in proto.graph.initializer}
        self.weights = {name: value for name, value in self.weights.items() if name in kept}
        restore_metadata(self.original, proto)
        return proto


def inner_graphs(node: Any) -> list[Any]:
    """Graphs in a GraphSurgeon node's attributes (branches of an If, body of a Loop or Scan)."""
    return [value for value in node.attrs.values() if isinstance(value, gs.Graph)]


def tensor_names(graph: Any) -> set[str]:
    """Names that a GraphSurgeon graph and the graphs inside it read or hand out."""
    names = {tensor.name for tensor in graph.outputs}
    for node in graph.nodes:
        names.update(tensor.name for tensor in node.inputs)
        for inner in inner_graphs(node):
            names |= tensor_names(inner)
    return names


def substitute(tensors: Any, old: Any, new: Any) -> None:
    """Put `new` wherever `old` stands in a node's inputs or outputs (or in a graph's list of them)."""
    for index, tensor in enumerate(list(tensors)):
        if tensor is old:
            tensors[index] = new


def _names(graph: GraphProto) -> Iterator[str]:
    yield from (value.name for values in (graph.input, graph.output) for value in values)
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
        for branch in _branches(node):
            yield from _names(branch)


def _move_out(graph: GraphProto, outer: Collection[str]) -> None:
    """GraphSurgeon moves a constant that only a branch reads into the branch; put it back."""
    have = {tensor.name for tensor in graph.initializer}
    for tensor in list(_inner_constants(graph, outer)):
        if tensor.name not in have:
            graph.initializer.append(tensor)
            have.add(tensor.name)


def _inner_constants(graph: GraphProto, outer: Collection[str]) -> Iterator[TensorProto]:
    """Take the initializers called as in `outer` out of the graphs inside `graph`."""
    for branch in (branch for node in graph.node for branch in _branches(node)):
        for tensor in [tensor for tensor in branch.initializer if tensor.name in outer]:
            moved = TensorProto()
            moved.CopyFrom(tensor)
            branch.initializer.remove(tensor)
            yield moved
        yield from _inner_constants(branch, outer)


def _raw(values: NDArray[np.generic]) -> bytes:
    return numpy_helper.from_array(np.ascontiguousarray(values)).raw_data


def restore_metadata(source: ModelProto, target: ModelProto) -> None:
    """Put node, graph and model metadata of `source` back on `target`: nodes by name, in subgraphs too."""
    _restore_graph(source.graph, target.graph)
    _replace(target.metadata_props, source.metadata_props)
    target.producer_name, target.producer_version = source.producer_name, source.producer_version
    target.domain, target.model_version = source.domain, source.model_version
    target.doc_string = source.doc_string
    oldest = find_min_ir_version_for(target.opset_import, ignore_unknown=True)
    target.ir_version = max(source.ir_version, oldest)


def _restore_graph(source: GraphProto, target: GraphProto) -> None:
    target.name, target.doc_string = source.name, source.doc_string
    _replace(target.metadata_props, source.metadata_props)
    nodes = {node.name: node for node in source.node if node.name}
    for node in target.node:
        if node.name in nodes:
            original = nodes[node.name]
            node.doc_string = original.doc_string
            _replace(node.metadata_props, original.metadata_props)
            present = {attribute.name for attribute in node.attribute}
            node.attribute.extend(a for a in original.attribute if _is_empty(a) and a.name not in present)
            for inner, restored in zip(_branches(original), _branches(node), strict=False):
                _restore_graph(inner, restored)


def _drop_empty_lists(graph: GraphProto) -> None:
    """GraphSurgeon cannot write an attribute that is an empty list; `restore_metadata` puts it back."""
    for node in graph.node:
        for attribute in [a for a in node.attribute if _is_empty(a)]:
            node.attribute.remove(attribute)
        for branch in _branches(node):
            _drop_empty_lists(branch)


def _is_empty(attribute: AttributeProto) -> bool:
    lists = (attribute.ints, attribute.floats, attribute.strings)
    return attribute.type in _LISTS and not any(lists)


def _branches(node: NodeProto) -> list[GraphProto]:
    """The node's subgraphs in the order of their attributes' names."""
    return [a.g for a in sorted(node.attribute, key=lambda a: a.name) if a.HasField("g")]


def _replace(target: Any, source: Any) -> None:
    """Make one repeated field equal to another; they may be the same object's."""
    entries = list(source)
    del target[:]
    target.extend(entries)
