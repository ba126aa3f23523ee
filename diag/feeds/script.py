"""A Python file whose `load_data()` gives the batches: Polygraphy's convention. Runs the user's own code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from diag.errors import DataError
from diag.feeds.source import Array, RawBatch, counted, hash_batch
from diag.feeds.user_code import blamed, load_function


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
        with blamed(self.file):
            produced = iter(self._load())
        index = 0
        while True:
            origin = f"{str(self.file)!r} batch {index}"
            with blamed(self.file):
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
        hint = "Write one that yields a dict of input name to array for each batch."
        return load_function(self.file, self.function, hint)


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
