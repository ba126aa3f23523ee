"""Reads the engine inspector's JSON: TensorRT 8.4 to 11, TensorRT-RTX, and what trtexec and TREX export."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diag.errors import DataError
from diag.kernels.kernel import Kernel, Tensor, dtype_of

_ONNX_LAYER = re.compile(r"\[ONNX Layer: (.*?)\](?=\s*(?:[\x1e\x1f\[]|$))")

_POINTWISE = re.compile(r"^(?:PWN\()+(.*?)\)+$")


def nodes_in(metadata: str) -> tuple[str, ...]:
    """ONNX nodes named in a kernel's metadata, each once, in order.

    A node's name may itself hold brackets; it ends at one that a separator, another entry or the end follows.
    """
    return tuple(dict.fromkeys(_ONNX_LAYER.findall(metadata)))


def kernels_from_json(text: str, where: str) -> tuple[Kernel, ...]:
    """Kernels of an inspector JSON. Raises DataError, naming `where`, when it is not one."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not complete JSON (line {error.lineno}: {error.msg})",
            "The file is truncated, or not an inspector file; export it again.",
        ) from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply to be an inspector file") from error
    return tuple(_kernel(layer, where) for layer in _layers(data, where))


def _layers(data: Any, where: str) -> Sequence[Any]:
    layers = data.get("Layers") if isinstance(data, dict) else data
    if not isinstance(layers, list):
        raise DataError(
            f"{where} is JSON without a list of layers: not an engine inspector's file",
            "Export it with IEngineInspector, or with trtexec --exportLayerInfo.",
        )
    if not layers:
        raise DataError(f"{where} lists no layers", "The engine is empty, or the export failed.")
    if any(isinstance(layer, str) for layer in layers):
        raise DataError(
            f"{where} holds only the layers' names: the build had no detailed profiling verbosity",
            "Build it with profiling_verbosity = DETAILED (trtexec: --profilingVerbosity=detailed).",
        )
    return layers


def _kernel(layer: Any, where: str) -> Kernel:
    if not isinstance(layer, Mapping) or not isinstance(layer.get("Name"), str):
        raise DataError(f"{where} holds an entry that is no layer: {str(layer)[:80]!r}")
    name = layer["Name"]
    metadata = layer.get("Metadata")
    return Kernel(
        name=name,
        layer_type=str(layer.get("LayerType", "")),
        nodes=nodes_in(metadata) if isinstance(metadata, str) else _nodes_in_name(name),
        inputs=(*_tensors(layer, "Inputs"), *_tensors(layer, "Constants", constant=True), *_weights(layer)),
        outputs=_tensors(layer, "Outputs"),
        tactic=str(layer.get("TacticName") or ""),
        stream=_int(layer.get("StreamId")),
    )


def _tensors(layer: Mapping[str, Any], key: str, *, constant: bool = False) -> tuple[Tensor, ...]:
    entries = layer.get(key)
    if not isinstance(entries, list):  # TensorRT 8 gives an empty object where a convolution has no constants
        return ()
    return tuple(_tensor(e, constant) for e in entries if isinstance(e, Mapping))


def _tensor(entry: Mapping[str, Any], constant: bool) -> Tensor:
    combined = str(entry.get("Format/Datatype", ""))
    dims = entry.get("Dimensions")
    return Tensor(
        name=str(entry.get("Name", "")),
        dims=tuple(_int(d) for d in dims) if isinstance(dims, list) else (),
        dtype=dtype_of(str(entry.get("Datatype", "")) or combined),
        format=str(entry.get("Format", "")) or combined,
        constant=constant,
    )


def _weights(layer: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """A convolution's own weights, which TensorRT 8 to 10 give as a type and a count."""
    weights = layer.get("Weights")
    if not isinstance(weights, Mapping) or not _int(weights.get("Count")):
        return ()
    dtype = dtype_of(str(weights.get("Type", "")))
    return (Tensor("weights", (_int(weights["Count"]),), dtype, constant=True),)


def _nodes_in_name(name: str) -> tuple[str, ...]:
    """Before TensorRT 8.5 there was no metadata: a fused layer's name joins its nodes' names."""
    if name.startswith(("{ForeignNode[", "Reformatting CopyNode")):
        return ()  # of a region only the first and the last node are named
    parts = (_POINTWISE.sub(r"\1", part) for part in re.split(r" \+ | \|\| ", name))
    return tuple(dict.fromkeys(part for part in parts if part))


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def times_from_json(text: str, where: str) -> dict[str, float]:
    """Average milliseconds by kernel name, from trtexec --exportProfile. DataError when it is not one."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not complete JSON (line {error.lineno}: {error.msg})") from error
    times: dict[str, float] = {}
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping) and isinstance(row.get("averageMs"), int | float):
            times[str(row.get("name"))] = float(row["averageMs"])
    if not times:
        raise DataError(f"{where} holds no kernel times", "Export it with trtexec --exportProfile.")
    return times
