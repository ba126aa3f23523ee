"""Writes a model to disk: whole or not at all, with external data when it is too large for one file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from diag.errors import OutputError
from diag.files import replacing
from diag.model.external import all_tensors, tensor_nbytes

PROTOBUF_LIMIT_BYTES = 2_000_000_000  # protobuf refuses messages over 2 GiB; some room for the graph


def save_model(proto: ModelProto, weights: Mapping[str, NDArray[np.generic]], path: Path) -> None:
    """Write `proto` with its detached `weights` to `path`; over 2 GB, values go to `<name>.data` beside it.

    Raises OutputError when the disk is full or the folder cannot be written; nothing partial is left.
    """
    if sum(array.nbytes for array in weights.values()) <= PROTOBUF_LIMIT_BYTES:
        with replacing(path) as partial:
            partial.write_bytes(embedded(proto, weights).SerializeToString())
        return
    full = ModelProto()
    full.CopyFrom(proto)
    data = path.with_name(path.name + ".data")
    is_new = not data.exists()
    try:  # both files are whole before either appears
        with replacing(path) as partial, replacing(data) as partial_data:
            _write_external(full, weights, partial_data, data.name)
            partial.write_bytes(full.SerializeToString())
    except OutputError:
        if is_new:
            with suppress(OSError):
                data.unlink()
        raise


def embedded(proto: ModelProto, weights: Mapping[str, NDArray[np.generic]]) -> ModelProto:
    """A self-contained copy of `proto`; only for models below protobuf's limit."""
    full = ModelProto()
    full.CopyFrom(proto)
    _embed(full, weights)
    return full


def _embed(proto: ModelProto, weights: Mapping[str, NDArray[np.generic]]) -> None:
    for tensor in all_tensors(proto.graph):
        if tensor.data_location == TensorProto.EXTERNAL and tensor.name in weights:
            values = onnx.numpy_helper.from_array(np.ascontiguousarray(weights[tensor.name]), tensor.name)
            tensor.CopyFrom(values)


def _write_external(
    proto: ModelProto, weights: Mapping[str, NDArray[np.generic]], file: Path, location: str
) -> None:
    with file.open("wb") as stream:
        for tensor in all_tensors(proto.graph):
            if tensor.data_location != TensorProto.EXTERNAL or tensor.name not in weights:
                continue
            raw = onnx.numpy_helper.from_array(np.ascontiguousarray(weights[tensor.name])).raw_data
            del tensor.external_data[:]
            entries = {"location": location, "offset": str(stream.tell()), "length": str(len(raw))}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=value)
            assert len(raw) == tensor_nbytes(tensor)
            stream.write(raw)
