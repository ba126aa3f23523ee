"""Finds the large initializers inside an ONNX file without reading them into memory.

Protobuf can only parse a message whole. A model is mostly initializers, so their bytes are cut out of the
message first (the protobuf wire format: https://protobuf.dev/programming-guides/encoding/) and stay in the
file, memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap

_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9  # field numbers in onnx.proto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    wire_type: int
    start: int
    """Where the field begins, its tag included."""
    payload: int
    """Where the value of a length-delimited field begins."""
    end: int


def detach(data: mmap, threshold: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The model message without the raw data of initializers over `threshold` bytes, and where those are.

    Returns the shortened message and (offset, length) in the file by initializer name.
    Raises ValueError when the message is malformed or ends early.
    """
    found: dict[str, tuple[int, int]] = {}
    parts: list[bytes] = []
    for field in _fields(data, 0, len(data)):
        if field.number == _GRAPH and field.wire_type == _BYTES:
            graph = _shorten_graph(data, field, threshold, found)
            parts.append(_delimited(_GRAPH, graph))
        else:
            parts.append(data[field.start : field.end])
    return b"".join(parts), found


def _shorten_graph(data: mmap, graph: _Field, threshold: int, found: dict[str, tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    for field in _fields(data, graph.payload, graph.end):
        if field.number == _INITIALIZER and field.end - field.payload > threshold:
            parts.append(_delimited(_INITIALIZER, _shorten_tensor(data, field, threshold, found)))
        else:
            parts.append(data[field.start : field.end])
    return b"".join(parts)


def _shorten_tensor(data: mmap, tensor: _Field, threshold: int, found: dict[str, tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    name, raw = "", None
    for field in _fields(data, tensor.payload, tensor.end):
        if field.number == _RAW_DATA and field.end - field.payload > threshold:
            raw = (field.payload, field.end - field.payload)
            continue
        if field.number == _NAME:
            name = data[field.payload : field.end].decode()
        parts.append(data[field.start : field.end])
    if raw:
        found[name] = raw
    return b"".join(parts)


def _fields(data: mmap, position: int, end: int) -> Iterator[_Field]:
    while position < end:
        start = position
        tag, position = _varint(data, position, end)
        payload, position = _skip(data, position, end, tag & 7)
        if position > end:
            raise ValueError("a field is longer than its message")
        yield _Field(tag >> 3, tag & 7, start, payload, position)


def _skip(data: mmap, position: int, end: int, wire_type: int) -> tuple[int, int]:
    """Start of the value and position behind it."""
    if wire_type == _VARINT:
        return position, _varint(data, position, end)[1]
    if wire_type == _FIXED64:
        return position, position + 8
    if wire_type == _FIXED32:
        return position, position + 4
    if wire_type == _BYTES:
        length, position = _varint(data, position, end)
        return position, position + length
    raise ValueError(f"unknown wire type {wire_type}")


def _varint(data: mmap, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number is cut off")


def _delimited(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _encoded(len(payload)) + payload


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
