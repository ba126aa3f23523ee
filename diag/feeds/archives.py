"""NumPy archives: one .npz file is one batch, its keys are the names of the model's inputs."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diag.errors import DataError
from diag.feeds.source import Array, RawBatch, counted, hash_files, unreadable


@dataclass(frozen=True, slots=True)
class Archives:
    """Batches in .npz files, in the order given; `place` is the file or folder as the user gave it."""

    place: str
    files: tuple[Path, ...]

    @property
    def seed(self) -> None:
        return None

    def label(self, limit: int | None) -> str:
        if self.files == (Path(self.place),):
            return f"1 batch from {self.place!r}"
        taken = self.count(limit)
        every = counted(len(self.files), ".npz file")
        return f"{counted(taken, 'batch')}, one per file, from the {every} in {self.place!r}"

    def count(self, limit: int | None) -> int:
        return len(self.files[:limit])

    def batches(self) -> Iterator[RawBatch]:
        for file in self.files:
            yield RawBatch(repr(str(file)), read_archive(file))

    def digest(self, limit: int | None) -> str:
        return hash_files(self.files[:limit])


def read_archive(file: Path) -> dict[str, Array]:
    """Arrays of one .npz file by name. Nothing in the file is ever unpickled.

    Raises DataError when the file is missing, truncated, no .npz archive, or holds Python objects.
    """
    try:
        # Opened here because np.load leaves a file open that it cannot read.
        with file.open("rb") as stream:
            return _arrays(np.load(stream, allow_pickle=False), file)
    except FileNotFoundError as error:
        raise DataError(f"data file {str(file)!r} does not exist", "Check the path.") from error
    except MemoryError as error:
        raise DataError(f"{str(file)!r} does not fit into memory", "Save smaller batches.") from error
    except ValueError as error:
        if str(error).startswith("Object arrays"):
            raise DataError(
                f"{str(file)!r} holds Python objects, which are never loaded",
                "Save plain numeric arrays with np.savez.",
            ) from error
        raise _broken(file) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise _broken(file) from error
    except OSError as error:
        if error.errno is None:  # NumPy's own complaint about the contents, not the system's
            raise _broken(file) from error
        raise unreadable(file, error) from error


def _arrays(loaded: object, file: Path) -> dict[str, Array]:
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise DataError(
            f"{str(file)!r} holds a single array without a name, not an .npz archive",
            "Save it with np.savez(path, INPUT_NAME=array).",
        )
    with loaded as archive:
        return {name: archive[name] for name in archive.files}


def _broken(file: Path) -> DataError:
    return DataError(
        f"{str(file)!r} is not a readable .npz archive (truncated, or another kind of file)",
        "Save it again with np.savez.",
    )
