"""Small models for the tests of loading and saving."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def floats(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(tuple(shape)).astype(np.float32)


def model_of(
    nodes: Iterable[NodeProto],
    initializers: Iterable[TensorProto] = (),
    inputs: dict[str, Sequence[int | str]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 18,
    domains: dict[str, int] | None = None,
) -> ModelProto:
    """A model with float inputs and float outputs of unknown shape."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, FLOAT, s) for n, s in (inputs or {"x": ["N", 24]}).items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        list(initializers),
    )
    opsets = [helper.make_opsetid(d, v) for d, v in {"": opset, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def linear(opset: int = 18) -> ModelProto:
    """x @ w + b; w (3 KB) is large enough to be kept beside the graph, b is not."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "mm"),
        helper.make_node("Add", ["m", "b"], ["y"], "add"),
    ]
    weights = [numpy_helper.from_array(floats((24, 32)), "w"), numpy_helper.from_array(floats((32,), 1), "b")]
    return model_of(nodes, weights, opset=opset)


def branch(output: str, *nodes: NodeProto, initializers: Sequence[TensorProto] = ()) -> GraphProto:
    """A subgraph without inputs, as an If needs it."""
    info = helper.make_tensor_value_info(output, FLOAT, None)
    return helper.make_graph(list(nodes), "branch", [], [info], list(initializers))


def saved(proto: ModelProto, folder: Path, name: str = "m.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def saved_outside(proto: ModelProto, folder: Path, one_file: bool = True) -> Path:
    """Saved with every initializer in external data, written by onnx itself."""
    path = folder / "m.onnx"
    onnx.save_model(
        proto,
        str(path),
        save_as_external_data=True,
        all_tensors_to_one_file=one_file,
        location="weights.bin" if one_file else None,
        size_threshold=0,
        convert_attribute=True,
    )
    return path
