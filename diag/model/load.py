"""Loads an ONNX model and makes it uniform: functions inlined, nodes named, large values beside the graph."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, inliner, numpy_helper

from diag.errors import ModelError
from diag.model import external, wire
from diag.model.graph import Model

OPSETS = range(11, 25)
STUB = "trtdiag:detached"
"""External location of an initializer whose values are kept beside the graph; no file can have this path."""

INLINE_BYTES = 1024
"""Initializers up to this size stay in the graph, where shape inference can read them."""


def load_model(path: str | Path) -> Model:
    """Read, check and normalise the ONNX model at `path`.

    Raises ModelError with a remedy when the file is missing, truncated, not ONNX, of an opset outside
    11 to 24, or refers to external data that are missing, too short or outside the model's folder.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"model file {str(path)!r} does not exist", "Give the path of an ONNX file.")
    maps = external.FileMaps()
    proto, inside = _parse(file, maps)
    _check_opset(proto, file)
    sha256 = fingerprint(file, proto, maps)
    weights = _detach_weights(proto, file.parent, maps)
    weights.update(inside)
    proto = _inline_functions(proto)
    _name_nodes(proto)
    return Model(str(path), proto, weights, sha256)


def from_proto(proto: ModelProto, path: str = "<memory>") -> Model:
    """A model that is already in memory, without external data; `proto` is copied."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    _check_opset(copy, Path(path))
    sha256 = hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()
    weights = _detach_weights(copy, Path(), external.FileMaps())
    copy = _inline_functions(copy)
    _name_nodes(copy)
    return Model(path, copy, weights, sha256)


def fingerprint(file: Path, proto: ModelProto, maps: external.FileMaps) -> str:
    """SHA-256 of the model file, followed by the bytes of each external tensor in graph order."""
    digest = hashlib.sha256()
    data = maps.open(file)
    digest.update(data)
    external.forget_pages(data)
    for tensor in external.all_tensors(proto.graph):
        if tensor.data_location == TensorProto.EXTERNAL and not is_stub(tensor):
            beside = external.external_file(tensor, file.parent)
            offset, length = external.external_range(tensor, beside)
            digest.update(memoryview(maps.open(beside))[offset : offset + length])
    return digest.hexdigest()


def _parse(file: Path, maps: external.FileMaps) -> tuple[ModelProto, dict[str, NDArray[np.generic]]]:
    """The graph, with stubs for the large initializers that the file holds, and their values."""
    proto = ModelProto()
    try:
        data = maps.open(file)
        message, found = wire.detach(data, INLINE_BYTES)
        proto.ParseFromString(message)
    except (DecodeError, ValueError) as error:
        raise ModelError(
            f"{str(file)!r} is not a readable ONNX model (truncated, or another kind of file)",
            "Export or copy it again.",
        ) from error
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    if not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{str(file)!r} holds no ONNX graph", "Give the path of an exported ONNX model.")
    weights: dict[str, NDArray[np.generic]] = {}
    for tensor in proto.graph.initializer:
        if tensor.name in found:
            weights[tensor.name] = external.as_array(tensor, data, *found[tensor.name])
            make_stub(tensor)
    return proto, weights


def _check_opset(proto: ModelProto, file: Path) -> None:
    versions = [o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")]
    if not versions:
        raise ModelError(f"{str(file)!r} names no ONNX opset", "Export the model again.")
    if versions[0] not in OPSETS:
        raise ModelError(
            f"{str(file)!r} uses ONNX opset {versions[0]}; {OPSETS.start} to {OPSETS.stop - 1} can be read",
            "Export it with another opset, or convert it with onnx.version_converter.",
        )


def _inline_functions(proto: ModelProto) -> ModelProto:
    if not proto.functions:
        return proto
    try:
        return inliner.inline_local_functions(proto)
    except Exception as error:
        raise ModelError(f"the model's local functions cannot be inlined: {error}") from error


def _name_nodes(proto: ModelProto) -> None:
    """Give each node a unique name; the same model always gets the same ones."""
    taken: set[str] = set()
    for node in proto.graph.node:
        first_output = next((name for name in node.output if name), "")
        name = node.name or f"{node.op_type}:{first_output}"
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name}#{count}"
        node.name = candidate
        taken.add(candidate)


def _detach_weights(
    proto: ModelProto, folder: Path, maps: external.FileMaps
) -> dict[str, NDArray[np.generic]]:
    weights: dict[str, NDArray[np.generic]] = {}
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            if is_stub(tensor):
                continue
            weights[tensor.name] = external.map_external(tensor, folder, maps)
        elif external.tensor_nbytes(tensor) > INLINE_BYTES and tensor.data_type != TensorProto.STRING:
            weights[tensor.name] = _take_values(tensor)
        else:
            continue
        make_stub(tensor)
    return weights


def _take_values(tensor: TensorProto) -> NDArray[np.generic]:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(f"initializer {tensor.name!r} is malformed: {error}") from error


def make_stub(tensor: TensorProto) -> None:
    """Turn an initializer into a reference to values kept elsewhere; name, type and shape stay."""
    stub = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    stub.data_location = TensorProto.EXTERNAL
    stub.external_data.add(key="location", value=STUB)
    tensor.CopyFrom(stub)


def is_stub(tensor: TensorProto) -> bool:
    """Whether `make_stub` made this initializer."""
    return any(entry.value == STUB for entry in tensor.external_data)
