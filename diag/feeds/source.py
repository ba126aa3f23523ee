"""What every kind of input data offers: batches that can be read again and again, and an identity."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diag.errors import DataError

Array = NDArray[Any]
Batch = dict[str, Array]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A batch as its source holds it, before it is checked against the model."""

    origin: str
    """Where it comes from, as an error names it: `'data/003.npz'`, `'inputs.json' batch 3`."""
    values: Mapping[str, object]


class Source(Protocol):
    """A kind of input data."""

    @property
    def seed(self) -> int | None:
        """Seed of random data; None for data that were given."""

    def label(self, limit: int | None) -> str:
        """What is fed, in words, when only the first `limit` batches are taken (None: all)."""

    def count(self, limit: int | None) -> int:
        """Number of batches, at most `limit`."""

    def batches(self) -> Iterator[RawBatch]:
        """The batches from the first one on; each call begins again."""

    def digest(self, limit: int | None) -> str:
        """SHA-256 (hex) that identifies the first `limit` batches (None: all)."""


def natural_key(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Sorts `b2` before `b10`: runs of digits compare as numbers, the rest as text."""
    parts = re.split(r"(\d+)", path.name)
    return tuple((0, int(p), "") if p.isdigit() and p.isascii() else (1, 0, p) for p in parts if p)


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 over each file's name, size and contents, read in pieces. Raises DataError."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        try:
            total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    total.update(chunk)
        except OSError as error:
            raise unreadable(file, error) from error
    return total.hexdigest()


def hash_batch(batch: Mapping[str, Array]) -> bytes:
    """SHA-256 over names, types, shapes and values of one batch."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return digest.digest()


def unreadable(file: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    return DataError(f"{str(file)!r} cannot be read: {error.strerror or error}", "Check its permissions.")


def counted(number: int, noun: str) -> str:
    """`1 batch`, `3 batches`, `2 .npz files`."""
    plural = noun + ("es" if noun.endswith(("ch", "s", "x")) else "s")
    return f"{number} {noun if number == 1 else plural}"
