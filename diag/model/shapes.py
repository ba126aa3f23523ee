"""Element types and shapes of every tensor, with symbolic dimensions bound to the data's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from diag.errors import ModelError
from diag.model.graph import Model, TensorInfo, value_info


def infer(
    model: Model,
    dims: Mapping[str, int] | None = None,
    values: Mapping[str, NDArray[Any]] | None = None,
) -> dict[str, TensorInfo]:
    """Types and shapes by tensor name: ONNX shape inference with data propagation.

    `dims` binds symbolic dimensions (see `bind`); `values` are computed values of shape arithmetic, which
    make the shapes behind them concrete. Tensors that inference cannot reach are absent; where operators
    contradict each other or what is declared, the engine that runs them says so, and nothing is known here.
    Raises ModelError when inference cannot read the graph.
    """
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    for value in proto.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dims and dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    if dims:
        _forget_symbolic_outputs(proto)
    if values:
        _fix_values(proto, values)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError, TypeError) as error:
        raise ModelError(
            f"the model's types and shapes cannot be inferred: {_first_line(error)}",
            "Export the model again.",
        ) from error
    graph = inferred.graph
    known = {v.name: value_info(v) for v in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        known[tensor.name] = TensorInfo(tensor.data_type, tuple(tensor.dims))
    return known


def bind(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Values of the symbolic input dimensions, given the shapes of one batch by input name."""
    bound: dict[str, int] = {}
    for name, info in model.inputs.items():
        for dim, size in zip(info.shape or (), shapes.get(name, ()), strict=False):
            if isinstance(dim, str):
                bound.setdefault(dim, size)
    return bound


def _forget_symbolic_outputs(proto: ModelProto) -> None:
    """Exporters leave invented symbols on outputs and inner values; they would win over inferred numbers."""
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        if any(not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim):
            value.type.tensor_type.ClearField("shape")


def _fix_values(proto: ModelProto, values: Mapping[str, NDArray[Any]]) -> None:
    """Replace nodes whose results are all known by initializers."""
    kept = []
    for node in proto.graph.node:
        if all(name in values for name in node.output if name):
            known = {name: values[name] for name in node.output if name}
            proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in known.items())
        else:
            kept.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(kept)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
