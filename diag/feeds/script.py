"""A Python file whose `load_data()` gives the batches: Polygraphy's convention. Runs the user's own code."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from diag.errors import DataError
from diag.feeds.source import Array, RawBatch, counted, hash_batch


class Script:
    """Batches from a function in a Python file; the function is called again for each pass.

    Each pass must give the same values (the reference and the candidate run in different passes):
    a batch that differs from the first pass raises DataError.
    """

    def __init__(self, file: Path, function: str = "load_data") -> None:
        self.file = file
        self.function = function
        self._seen: list[bytes] = []
        self._seen_all = False

    @property
    def seed(self) -> None:
        return None

    def label(self, limit: int | None) -> str:
        taken = counted(self.count(limit), "batch")
        return f"{taken} from {self.function}() in {str(self.file)!r}"

    def count(self, limit: int | None) -> int:
        self._see(limit)
        return len(self._seen[:limit])

    def batches(self) -> Iterator[RawBatch]:
        with self._blamed():
            produced = iter(self._load())
        index = 0
        while True:
            origin = f"{str(self.file)!r} batch {index}"
            with self._blamed():
                batch = next(produced, None)
            if batch is None:
                self._seen_all = True
                return
            values = _arrays(batch, origin)
            self._remember(index, values, origin)
            yield RawBatch(origin, values)
            index += 1

    def digest(self, limit: int | None) -> str:
        self._see(limit)
        return hashlib.sha256(b"".join(self._seen[:limit])).hexdigest()

    def _see(self, limit: int | None) -> None:
        """Run through the batches once; how many there are cannot be known otherwise."""
        if not self._seen_all and (limit is None or len(self._seen) < limit):
            for _ in islice(self.batches(), limit):
                pass

    def _remember(self, index: int, values: Mapping[str, Array], origin: str) -> None:
        digest = hash_batch(values)
        if index == len(self._seen):
            self._seen.append(digest)
        elif self._seen[index] != digest:
            raise DataError(
                f"{origin} differs from the one that an earlier call of {self.function}() gave",
                "Every call must give the same batches: seed its random numbers.",
            )

    @cached_property
    def _load(self) -> Callable[[], Iterator[object]]:
        spec = importlib.util.spec_from_file_location(f"trtdiag_data_{self.file.stem}", self.file)
        if spec is None or spec.loader is None:
            raise DataError(f"{str(self.file)!r} is not a Python file", "Its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(self.file.resolve().parent))  # as Python does for a script that it runs
        try:
            with self._blamed():
                spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        function = getattr(module, self.function, None)
        if not callable(function):
            raise DataError(
                f"{str(self.file)!r} defines no function {self.function}()",
                "Write one that yields a dict of input name to array for each batch.",
            )
        return function  # type: ignore[no-any-return]

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Turn whatever the user's code raises into a DataError that names its line."""
        try:
            yield
        except DataError:
            raise
        except (Exception, SystemExit) as error:
            line = _line_in(self.file, error)
            place = f"{str(self.file)!r}, line {line}" if line else repr(str(self.file))
            raise DataError(f"{place}: {type(error).__name__}: {error}", "Correct the script.") from error


def _line_in(file: Path, error: BaseException) -> int:
    """Line of `file` nearest to where `error` was raised, 0 when it was raised elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(file)), 0)


def _arrays(batch: object, origin: str) -> dict[str, Array]:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"{origin} is a {type(batch).__name__}, not a dict of input name to array",
            "Yield one dict for each batch.",
        )
    try:
        return {str(name): np.asarray(value) for name, value in batch.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{origin} holds a value that is no array: {error}", "Yield NumPy arrays.") from error
