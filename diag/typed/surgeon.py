"""ONNX GraphSurgeon as the rewriting engine: opens a model as a graph, closes it as a model again.

GraphSurgeon drops what it does not know (metadata of nodes and of the model, among it the exporter's
module paths); it is put back here, by node name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper
from onnx_graphsurgeon.logger import G_LOGGER

from diag.model.load import INLINE_BYTES, make_stub

G_LOGGER.severity = G_LOGGER.ERROR  # it prints to standard output, where --json belongs to the caller

NAMESPACE = "trtdiag"
"""Nodes that a rewrite adds are called `trtdiag/...`."""

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
    notes: list[str] = field(default_factory=list)
    """What a reader of the report should know about the rewrite."""

    @classmethod
    def open(cls, proto: ModelProto, weights: Mapping[str, NDArray[np.generic]]) -> Surgery:
        """Start on a copy of `proto`; the given model is not changed."""
        copy = ModelProto()
        copy.CopyFrom(proto)
        return cls(gs.import_onnx(copy), dict(weights), proto)

    def constant(self, name: str, values: NDArray[np.generic], fmt: str) -> Any:
        """A new constant; large values go to `weights`, as they do in a loaded model."""
        tensor = TensorProto(name=name, data_type=ELEM_TYPE[fmt], dims=values.shape)
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
        kept = {tensor.name for tensor in proto.graph.initializer}
        self.weights = {name: value for name, value in self.weights.items() if name in kept}
        restore_metadata(self.original, proto)
        return proto


def substitute(tensors: Any, old: Any, new: Any) -> None:
    """Put `new` wherever `old` stands in a node's inputs or outputs (or in a graph's list of them)."""
    for index, tensor in enumerate(list(tensors)):
        if tensor is old:
            tensors[index] = new


def _raw(values: NDArray[np.generic]) -> bytes:
    return numpy_helper.from_array(np.ascontiguousarray(values)).raw_data


def restore_metadata(source: ModelProto, target: ModelProto) -> None:
    """Put node and model metadata of `source` back on `target`, by node name."""
    nodes = {node.name: node for node in source.graph.node}
    for node in target.graph.node:
        if node.name in nodes:
            node.doc_string = nodes[node.name].doc_string
            del node.metadata_props[:]
            node.metadata_props.extend(nodes[node.name].metadata_props)
    for entry in source.metadata_props:
        target.metadata_props.add(key=entry.key, value=entry.value)
    target.producer_name, target.producer_version = source.producer_name, source.producer_version
    target.ir_version = max(target.ir_version, source.ir_version)
    target.graph.name = source.graph.name
