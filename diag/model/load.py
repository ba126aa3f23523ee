"""Loads an ONNX model and makes it uniform: functions inlined, nodes named, large values beside the graph."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from diag.errors import ModelError
from diag.model import external
from diag.model.graph import Model

OPSETS = range(11, 25)
INLINE_BYTES = 1024
"""Initializers up to this size stay in the graph, where shape inference can read them."""

_HASH_CHUNK_BYTES = 1 << 24


def load_model(path: str | Path) -> Model:
    """Read, check and normalise the ONNX model at `path`.

    Raises ModelError with a remedy when the file is missing, truncated, not ONNX, of an opset outside
    11 to 24, or refers to external data that are missing, too short or outside the model's folder.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"model file {str(path)!r} does not exist", "Give the path of an ONNX file.")
    proto = _parse(file)
    _check_opset(proto, file)
    sha256 = fingerprint(file, proto)
    proto = _inline_functions(proto)
    _name_nodes(proto)
    weights = _detach_weights(proto, file.parent)
    return Model(str(path), proto, weights, sha256)


def from_proto(proto: ModelProto, path: str = "<memory>") -> Model:
    """A model that is already in memory, without external data; `proto` is copied."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    _check_opset(copy, Path(path))
    sha256 = hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()
    copy = _inline_functions(copy)
    _name_nodes(copy)
    return Model(path, copy, _detach_weights(copy, Path()), sha256)


def fingerprint(file: Path, proto: ModelProto) -> str:
    """SHA-256 of the model file, followed by the bytes of each external tensor in graph order."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    for tensor in external.all_tensors(proto.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            data = external.external_file(tensor, file.parent)
            offset, length = external.external_range(tensor, data)
            _update_from_file(digest, data, offset, length)
    return digest.hexdigest()


def _update_from_file(digest: hashlib._Hash, path: Path, offset: int, length: int) -> None:
    with path.open("rb") as stream:
        stream.seek(offset)
        while length > 0 and (chunk := stream.read(min(length, _HASH_CHUNK_BYTES))):
            digest.update(chunk)
            length -= len(chunk)


def _parse(file: Path) -> ModelProto:
    proto = ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ModelError(
            f"{str(file)!r} is not a readable ONNX model (truncated, or another kind of file)",
            "Export or copy it again.",
        ) from error
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    if not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{str(file)!r} holds no ONNX graph", "Give the path of an exported ONNX model.")
    return proto


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
        return onnx.inliner.inline_local_functions(proto)
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


def _detach_weights(proto: ModelProto, folder: Path) -> dict[str, NDArray[np.generic]]:
    weights: dict[str, NDArray[np.generic]] = {}
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            weights[tensor.name] = external.map_external(tensor, folder)
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
    stub.external_data.add(key="location", value="weights")
    tensor.CopyFrom(stub)
