"""Initializers whose values lie in files beside the model. Paths never leave the model's folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from diag.errors import ModelError
from diag.model.graph import subgraphs

_PACKED_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
PACKED = {
    getattr(TensorProto, name): bits for name, bits in _PACKED_BITS.items() if hasattr(TensorProto, name)
}

"""Element types of which several lie in a byte, and their bits."""


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Initializers and tensor attributes of a graph and of its subgraphs."""
    yield from graph.initializer
    sparse = list(graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            sparse += [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            sparse += attribute.sparse_tensors
        for inner in subgraphs(node):
            yield from all_tensors(inner)
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices


def external_file(tensor: TensorProto, folder: Path) -> Path:
    """File that holds an external tensor's values.

    Raises ModelError when the path is absolute, leaves `folder` (also through a link), or does not exist.
    """
    location = next((e.value for e in tensor.external_data if e.key == "location"), "")
    path = _resolved(folder, location)
    if path is None:
        raise ModelError(
            f"tensor {tensor.name!r} keeps its values in {location!r}, outside the model's folder",
            "Such a model is refused; save it again with its data beside it.",
        )
    if not path.is_file():
        raise ModelError(
            f"external data file {location!r} of tensor {tensor.name!r} is missing from {folder}",
            "Copy it beside the model.",
        )
    return path


def _resolved(folder: Path, location: str) -> Path | None:
    """Where `location` leads, None when that is not inside `folder`."""
    if not location or Path(location).is_absolute():
        return None
    try:
        path = (folder / location).resolve()
        path.is_file()  # fails for names that no file can have
    except (OSError, ValueError, RuntimeError):
        return None
    return path if path.is_relative_to(folder.resolve()) else None


def external_range(tensor: TensorProto, path: Path) -> tuple[int, int]:
    """Offset and length in bytes of an external tensor. Raises ModelError when the file is too short."""
    entries = {e.key: e.value for e in tensor.external_data}
    try:
        offset = int(entries.get("offset", 0) or 0)
        length = int(entries.get("length", 0) or 0) or tensor_nbytes(tensor)
    except ValueError as error:
        raise _damaged(f"tensor {tensor.name!r} has an offset or length that is no number") from error
    if offset < 0 or length < 0:
        raise _damaged(f"tensor {tensor.name!r} has a negative offset or length")
    if offset + length > path.stat().st_size:
        raise ModelError(
            f"external data file {path.name!r} ends before tensor {tensor.name!r}",
            "The file is truncated or belongs to another model; copy it again.",
        )
    return offset, length


def tensor_nbytes(tensor: TensorProto) -> int:
    """Bytes that a tensor's values take on disk. Raises ModelError for unknown types and negative shapes."""
    if any(size < 0 for size in tensor.dims):
        raise _damaged(f"tensor {tensor.name!r} has the negative shape {tuple(tensor.dims)}")
    count = math.prod(tensor.dims)
    if tensor.data_type in PACKED:
        return -(-count * PACKED[tensor.data_type] // 8)
    try:
        return count * int(tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError as error:
        raise _damaged(f"tensor {tensor.name!r} has the unknown element type {tensor.data_type}") from error


def _damaged(problem: str) -> ModelError:
    return ModelError(problem, "The model is damaged; export it again.")


def check_inline(tensor: TensorProto) -> None:
    """Whether a tensor's own bytes fit its shape. Raises ModelError."""
    if tensor.HasField("raw_data") and len(tensor.raw_data) != tensor_nbytes(tensor):
        raise _misfit(tensor, len(tensor.raw_data))


def _misfit(tensor: TensorProto, length: int) -> ModelError:
    needed = tensor_nbytes(tensor)
    return _damaged(f"tensor {tensor.name!r} holds {length} bytes where its shape needs {needed}")


class FileMaps:
    """Memory maps of files, each opened once."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap] = {}

    def open(self, path: Path) -> mmap:
        """The whole file, read-only. Raises ModelError when it is empty or cannot be read."""
        if path not in self._maps:
            try:
                with path.open("rb") as stream:
                    self._maps[path] = mmap(stream.fileno(), 0, access=ACCESS_READ)
            except ValueError as error:
                raise ModelError(f"{str(path)!r} is empty", "Export or copy it again.") from error
            except OSError as error:
                raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        return self._maps[path]


def forget_pages(data: mmap) -> None:
    """Give back the memory of a map that was read through; the next read brings it from the file again."""
    if hasattr(mmap, "madvise"):  # Linux and macOS
        data.madvise(MADV_DONTNEED)


def map_external(tensor: TensorProto, folder: Path, maps: FileMaps) -> NDArray[np.generic]:
    """Values of an external tensor, memory-mapped read-only."""
    path = external_file(tensor, folder)
    offset, length = external_range(tensor, path)
    if length == 0:
        return np.zeros(tuple(tensor.dims), tensor_dtype_to_np_dtype(tensor.data_type))
    return as_array(tensor, maps.open(path), offset, length)


def take_in(tensor: TensorProto, folder: Path, maps: FileMaps) -> None:
    """Make an external tensor hold its values itself."""
    path = external_file(tensor, folder)
    offset, length = external_range(tensor, path)
    tensor.raw_data = maps.open(path)[offset : offset + length] if length else b""
    del tensor.external_data[:]
    tensor.ClearField("data_location")


def as_array(tensor: TensorProto, data: mmap, offset: int, length: int) -> NDArray[np.generic]:
    """A tensor's values in a mapped file (packed 4-bit types are unpacked in memory).

    Raises ModelError when the bytes do not fit the tensor's shape.
    """
    if length != tensor_nbytes(tensor) or tensor.data_type == TensorProto.STRING:
        raise _misfit(tensor, length)
    if tensor.data_type in PACKED:
        loaded = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        loaded.raw_data = data[offset : offset + length]
        return onnx.numpy_helper.to_array(loaded)
    dtype = tensor_dtype_to_np_dtype(tensor.data_type)
    count = length // dtype.itemsize
    return np.frombuffer(data, dtype, count, offset).reshape(tuple(tensor.dims))
