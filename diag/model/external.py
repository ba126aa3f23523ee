"""Initializers whose values lie in files beside the model. Paths never leave the model's folder."""

from __future__ import annotations

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

_PACKED = {TensorProto.INT4, TensorProto.UINT4, getattr(TensorProto, "FLOAT4E2M1", -1)}  # two values a byte


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Initializers and tensor attributes of a graph and of its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in subgraphs(node):
            yield from all_tensors(inner)


def external_file(tensor: TensorProto, folder: Path) -> Path:
    """File that holds an external tensor's values.

    Raises ModelError when the path is absolute, leaves `folder` (also through a link), or does not exist.
    """
    location = next((e.value for e in tensor.external_data if e.key == "location"), "")
    path = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not path.is_relative_to(folder.resolve()):
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


def external_range(tensor: TensorProto, path: Path) -> tuple[int, int]:
    """Offset and length in bytes of an external tensor. Raises ModelError when the file is too short."""
    entries = {e.key: e.value for e in tensor.external_data}
    offset = int(entries.get("offset", 0) or 0)
    length = int(entries.get("length", 0) or 0) or tensor_nbytes(tensor)
    if offset < 0 or offset + length > path.stat().st_size:
        raise ModelError(
            f"external data file {path.name!r} ends before tensor {tensor.name!r}",
            "The file is truncated or belongs to another model; copy it again.",
        )
    return offset, length


def tensor_nbytes(tensor: TensorProto) -> int:
    """Bytes that a tensor's values take on disk."""
    count = int(np.prod(list(tensor.dims), dtype=np.int64)) if tensor.dims else 1
    if tensor.data_type in _PACKED:
        return (count + 1) // 2
    return count * int(tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


class FileMaps:
    """Memory maps of files, each opened once."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap] = {}

    def open(self, path: Path) -> mmap:
        """The whole file, read-only. Raises OSError; ValueError when it is empty."""
        if path not in self._maps:
            with path.open("rb") as stream:
                self._maps[path] = mmap(stream.fileno(), 0, access=ACCESS_READ)
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


def as_array(tensor: TensorProto, data: mmap, offset: int, length: int) -> NDArray[np.generic]:
    """A tensor's values in a mapped file (packed 4-bit types are unpacked in memory).

    Raises ModelError when the bytes do not fit the tensor's shape.
    """
    if length != tensor_nbytes(tensor):
        raise ModelError(
            f"tensor {tensor.name!r} holds {length} bytes where its shape needs {tensor_nbytes(tensor)}",
            "The model is damaged; export it again.",
        )
    if tensor.data_type in _PACKED:
        loaded = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        loaded.raw_data = data[offset : offset + length]
        return onnx.numpy_helper.to_array(loaded)
    dtype = tensor_dtype_to_np_dtype(tensor.data_type)
    count = length // dtype.itemsize
    return np.frombuffer(data, dtype, count, offset).reshape(tuple(tensor.dims))
