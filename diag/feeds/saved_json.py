"""Inputs that Polygraphy saved as JSON (`--save-inputs`, `polygraphy.json.save_json`).

The arrays are decoded here instead of by Polygraphy: its decoder hands values of other classes to other
libraries (a tensor of PyTorch to `torch.load`), and it holds a whole file in memory. Data stay data here,
and one batch is in memory at a time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from diag.errors import DataError
from diag.feeds.source import Array, RawBatch, counted, hash_files, unreadable

# A string, whole (so that brackets inside it do not count), or a bracket. Possessive: no backtracking.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}"]', re.DOTALL)
_CLASS = "polygraphy_class"
_LEGACY_PREFIX = "__polygraphy_encoded_"


@dataclass(frozen=True, slots=True)
class _Place:
    """One batch in a file: its number there, and where its text begins and ends, in bytes."""

    file: Path
    index: int
    start: int
    end: int


@dataclass(frozen=True)
class SavedJson:
    """Batches in JSON files: each holds a list of batches, or one batch."""

    place: str
    files: tuple[Path, ...]

    @property
    def seed(self) -> None:
        return None

    @cached_property
    def _places(self) -> tuple[_Place, ...]:
        return tuple(place for file in self.files for place in batch_places(file))

    def label(self, limit: int | None) -> str:
        files = "" if len(self.files) == 1 else f"the {len(self.files)} files in "
        return f"{counted(self.count(limit), 'batch')} that Polygraphy saved, from {files}{self.place!r}"

    def count(self, limit: int | None) -> int:
        return len(self._places[:limit])

    def batches(self) -> Iterator[RawBatch]:
        for place in self._places:
            origin = f"{str(place.file)!r} batch {place.index}"
            yield RawBatch(origin, _decode_batch(_read(place), origin))

    def digest(self, limit: int | None) -> str:
        # A file may hold more batches than are taken, so the number belongs to the identity.
        return hashlib.sha256(f"{hash_files(self.files)}\0{self.count(limit)}".encode()).hexdigest()


def batch_places(file: Path) -> list[_Place]:
    """Where each batch lies in a JSON file. The file is mapped, not read.

    Raises DataError when the file is missing, empty, truncated, or neither a list nor an object.
    """
    try:
        if file.stat().st_size == 0:
            raise _broken(file)
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return [_Place(file, i, *span) for i, span in enumerate(_spans(text, file))]
    except FileNotFoundError as error:
        raise DataError(f"data file {str(file)!r} does not exist", "Check the path.") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _spans(text: mmap.mmap, file: Path) -> Iterator[tuple[int, int]]:
    opened: list[bytes] = []
    start, batch_depth = 0, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == b'"':
            raise _broken(file)  # a string that never ends
        if token in (b"{", b"["):
            if not opened and token == b"[":
                batch_depth = 1
            elif len(opened) == batch_depth:
                start = match.start()
            opened.append(token)
        elif token in (b"}", b"]"):
            if not opened or opened.pop() + token not in (b"{}", b"[]"):
                raise _broken(file)
            if len(opened) == batch_depth and token == b"}":
                yield start, match.end()
    if opened or text[:64].lstrip()[:1] not in (b"{", b"["):
        raise _broken(file)


def _read(place: _Place) -> bytes:
    try:
        with place.file.open("rb") as stream:
            stream.seek(place.start)
            return stream.read(place.end - place.start)
    except OSError as error:
        raise unreadable(place.file, error) from error


def _decode_batch(text: bytes, origin: str) -> dict[str, Array]:
    try:
        batch = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not valid JSON: {error}", "Save the inputs again.") from error
    if _CLASS in batch:
        raise DataError(
            f"{origin} is a saved {batch[_CLASS]!r} of Polygraphy, not inputs",
            "Use the file of --save-inputs, not the one of --save-outputs.",
        )
    return {name: _decode_array(value, f"{origin}, input {name!r},") for name, value in batch.items()}


def _decode_array(value: object, where: str) -> Array:
    kind, payload = _payload(value)
    if kind != "ndarray" or not isinstance(payload, str):
        held = f"a {kind!r}" if kind else "no array"
        raise DataError(
            f"{where} holds {held} where Polygraphy's NumPy array is expected",
            "Save NumPy arrays with polygraphy.json.save_json, or use .npz files.",
        )
    try:
        loaded = np.load(io.BytesIO(base64.b64decode(payload, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError, MemoryError) as error:
        raise DataError(f"{where} holds an array that cannot be decoded", "Save the inputs again.") from error
    if not isinstance(loaded, np.ndarray):
        raise DataError(f"{where} holds an archive where an array is expected", "Save the inputs again.")
    return loaded


def _payload(value: object) -> tuple[str, object]:
    """Class name and content of an encoded value; old versions of Polygraphy mark the class by a key."""
    if not isinstance(value, dict):
        return "", None
    legacy = next((k[len(_LEGACY_PREFIX) :] for k in value if str(k).startswith(_LEGACY_PREFIX)), "")
    return str(value.get(_CLASS, legacy)), value.get("array")


def _broken(file: Path) -> DataError:
    return DataError(
        f"{str(file)!r} is not a readable JSON file of saved inputs (truncated, or another kind of file)",
        "Save the inputs again.",
    )
