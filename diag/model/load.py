"""Loads an ONNX model and makes it uniform: functions inlined, nodes named, large values beside the graph."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from diag.errors import ModelError
from diag.model import external, wire
from diag.model.functions import inline_functions
from diag.model.graph import Model, captured_names, free_name

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
    _check_is_file(file)
    maps = external.FileMaps()
    try:
        proto, inside = _parse(file, maps)
        _check_opset(proto, file)
        proto = inline_functions(proto)
        sha256 = fingerprint(file, proto, maps)
        weights = _detach_weights(proto, file.parent, maps)
        weights.update(inside)
        return _named(str(path), proto, weights, sha256)
    except (ValueError, KeyError, IndexError, TypeError) as error:  # bad UTF-8, attributes without type
        raise ModelError(f"{str(file)!r} is damaged: {error}", "Export or copy it again.") from error


def from_proto(proto: ModelProto, path: str = "<memory>") -> Model:
    """A model that is already in memory, without external data; `proto` is copied."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    _check_opset(copy, Path(path))
    sha256 = hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()
    copy = inline_functions(copy)
    weights = _detach_weights(copy, Path(), external.FileMaps())
    return _named(path, copy, weights, sha256)


def _named(path: str, proto: ModelProto, weights: dict[str, NDArray[np.generic]], sha256: str) -> Model:
    _name_nodes(proto)
    model = Model(path, proto, weights, sha256)
    for layer in model.layers:  # a node that cannot be read is found here, not later
        for name in (layer.id, layer.op_type, *layer.reads, *layer.outputs):
            if not isinstance(name, str):  # protobuf gives bytes where it does not raise
                raise ModelError(
                    f"{path!r} is damaged: the name {name!r} is no text", "Export or copy it again."
                )
    return model


def _check_is_file(file: Path) -> None:
    try:
        if file.is_dir():
            raise ModelError(f"{str(file)!r} is a folder", "Give the path of the ONNX file in it.")
        if not file.is_file():
            raise ModelError(f"model file {str(file)!r} does not exist", "Give the path of an ONNX file.")
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror}") from error


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
            if length:
                digest.update(memoryview(maps.open(beside))[offset : offset + length])
    return digest.hexdigest()


def _parse(file: Path, maps: external.FileMaps) -> tuple[ModelProto, dict[str, NDArray[np.generic]]]:
    """The graph, with stubs for the large initializers that the file holds, and their values."""
    proto = ModelProto()
    data = maps.open(file)
    try:
        message, found = wire.detach(data, INLINE_BYTES)
        proto.ParseFromString(message)
    except (DecodeError, ValueError) as error:
        raise ModelError(
            f"{str(file)!r} is not a readable ONNX model (truncated, or another kind of file)",
            "Export or copy it again.",
        ) from error
    if not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{str(file)!r} holds no ONNX graph", "Give the path of an exported ONNX model.")
    weights: dict[str, NDArray[np.generic]] = {}
    for tensor in proto.graph.initializer:
        if is_stub(tensor):
            raise ModelError(
                f"{str(file)!r} was saved without the values of {tensor.name!r}", "Export the model again."
            )
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


def _name_nodes(proto: ModelProto) -> None:
    """Give each node a unique name; the same model always gets the same ones.

    A name of the user's stays with the first node that carries it, whatever others are made up.
    """
    kept: set[str] = {""}
    nameless = []
    for node in proto.graph.node:
        if node.name in kept:
            nameless.append(node)
        kept.add(node.name)
    for node in nameless:
        first_output = next((name for name in node.output if name), "")
        node.name = free_name(node.name or f"{node.op_type}:{first_output}", kept)
        kept.add(node.name)


def _detach_weights(
    proto: ModelProto, folder: Path, maps: external.FileMaps
) -> dict[str, NDArray[np.generic]]:
    """Take the large initializers out of the graph; what subgraphs and attributes keep in files comes in."""
    weights: dict[str, NDArray[np.generic]] = {}
    for tensor in proto.graph.initializer:
        if is_stub(tensor):
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            if external.tensor_nbytes(tensor) <= INLINE_BYTES:
                continue  # a Reshape's shape, say: it must be readable, so it comes in below
            weights[tensor.name] = external.map_external(tensor, folder, maps)
        elif external.tensor_nbytes(tensor) > INLINE_BYTES and tensor.data_type != TensorProto.STRING:
            weights[tensor.name] = _take_values(tensor)
        else:
            continue
        make_stub(tensor)
    for tensor in external.all_tensors(proto.graph):
        if tensor.data_location != TensorProto.EXTERNAL:
            external.check_inline(tensor)
        elif not is_stub(tensor):
            external.take_in(tensor, folder, maps)
    return weights


def _take_values(tensor: TensorProto) -> NDArray[np.generic]:
    external.check_inline(tensor)
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(f"initializer {tensor.name!r} is malformed: {error}") from error


def initializer(
    name: str, values: NDArray[np.generic], weights: dict[str, NDArray[np.generic]]
) -> TensorProto:
    """A constant as a loaded model has it: large values are put into `weights`, beside the graph."""
    if values.nbytes <= INLINE_BYTES:
        return numpy_helper.from_array(values, name)
    weights[name] = values
    return stub(name, values)


def drop_unused(proto: ModelProto, weights: dict[str, NDArray[np.generic]]) -> set[str]:
    """Take out constants that nothing reads: ONNX Runtime refuses their values. The names that are read."""
    read = {name for node in proto.graph.node for name in (*node.input, *captured_names(node))}
    read |= {value.name for value in proto.graph.output}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    for name in [name for name in weights if name not in read]:
        del weights[name]
    return read


def stub(name: str, values: NDArray[np.generic]) -> TensorProto:
    """An initializer whose values are kept beside the graph."""
    tensor = TensorProto(
        name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=values.shape
    )
    make_stub(tensor)
    return tensor


def make_stub(tensor: TensorProto) -> None:
    """Turn an initializer into a reference to values kept elsewhere; name, type and shape stay."""
    stub = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    stub.data_location = TensorProto.EXTERNAL
    stub.external_data.add(key="location", value=STUB)
    tensor.CopyFrom(stub)


def is_stub(tensor: TensorProto) -> bool:
    """Whether `make_stub` made this initializer."""
    return any(entry.value == STUB for entry in tensor.external_data)
