"""A model's 16-bit floats as FP32: the model that a plan with a 16-bit base starts from.

Requires: an own copy of the graph, which is changed. Ensures: no 16-bit float constant, input, output or Cast
is left in the main graph; a Cast between floats is gone, unless it writes an output of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, numpy_helper

from diag.model.graph import TensorInfo
from diag.model.load import is_stub, make_stub

HALVES = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
_FLOATS = HALVES | {int(TensorProto.FLOAT)}


def raise_floats(
    proto: ModelProto, weights: dict[str, NDArray[np.generic]], types: Mapping[str, TensorInfo]
) -> None:
    """Turn every 16-bit float of the main graph into FP32; `types` are those of the tensors before."""
    graph = proto.graph
    for tensor in graph.initializer:
        if tensor.data_type in HALVES:
            _raise(tensor, weights)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    outputs = {value.name for value in graph.output}
    gone: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = gone.get(name, name)
        _raise_attributes(node, weights)
        if _between_floats(node, types) and node.output[0] not in outputs:
            gone[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _raise(tensor: TensorProto, weights: dict[str, NDArray[np.generic]]) -> None:
    stub = is_stub(tensor)
    value = (weights[tensor.name] if stub else numpy_helper.to_array(tensor)).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    if stub:
        weights[tensor.name] = value
        make_stub(tensor)


def _raise_attributes(node: NodeProto, weights: dict[str, NDArray[np.generic]]) -> None:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in HALVES:
            _raise(attribute.t, weights)
        if attribute.name == "to" and attribute.i in HALVES:
            attribute.i = TensorProto.FLOAT


def _between_floats(node: NodeProto, types: Mapping[str, TensorInfo]) -> bool:
    if node.op_type != "Cast" or node.input[0] not in types:
        return False
    to = next(attribute.i for attribute in node.attribute if attribute.name == "to")
    return to in _FLOATS and types[node.input[0]].elem_type in _FLOATS
