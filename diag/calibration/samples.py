"""Samples of the calibration data: what identifies them, and into which half of the data each falls.

Both depend on a sample's values only, not on its place, so that any split of the data into runs, in any
order, gives the same halves. That makes them shuffled, and about equally large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.feeds.check import checked
from diag.feeds.feeds import Feeds, open_source
from diag.feeds.source import Batch, RawBatch, hash_batch
from diag.model.graph import TensorInfo

KEYS = 1 << 256
"""Keys of samples are SHA-256 numbers; those of many samples are added modulo this."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Split:
    """The samples of one batch, in two halves."""

    key: int
    """Identity of the batch: the sum of its samples' keys, modulo 2^256."""
    order: NDArray[np.intp]
    """Indices of the samples, those of the first half first."""
    first: int
    """Number of samples in the first half."""

    @property
    def samples(self) -> int:
        return len(self.order)

    def halves(self, array: Array) -> tuple[Array, Array]:
        """The parts of a tensor that belong to the samples of each half, contiguous.

        A tensor whose first axis is no multiple of the number of samples goes into one half as a whole.
        """
        if self.samples == 1 or array.ndim == 0 or array.shape[0] % self.samples or not array.size:
            whole, nothing = np.ascontiguousarray(array), array.reshape(-1)[:0]
            return (whole, nothing) if self._whole_is_first else (nothing, whole)
        by_sample = array.reshape(self.samples, -1, *array.shape[1:])
        ordered = np.take(by_sample, self.order, axis=0)
        shape = (-1, *array.shape[1:])
        return ordered[: self.first].reshape(shape), ordered[self.first :].reshape(shape)

    @property
    def _whole_is_first(self) -> bool:
        return self.first == 1 if self.samples == 1 else self.key % 2 == 0


def split(batch: Mapping[str, Array]) -> Split:
    """Keys of the samples of a batch: slices along the first axis, if all inputs have as many.

    Otherwise the whole batch is one sample.
    """
    keys = sample_keys(batch)
    second = np.array([key % 2 for key in keys])
    return Split(sum(keys) % KEYS, np.argsort(second, kind="stable"), int(len(keys) - second.sum()))


def sample_keys(batch: Mapping[str, Array]) -> list[int]:
    """Key of each sample of a batch; of the whole batch when its inputs differ in their first axis."""
    sizes = {array.shape[0] if array.ndim else 0 for array in batch.values()}
    samples = sizes.pop() if len(sizes) == 1 else 1
    if samples <= 1:
        return [_key(batch)]
    return [_key({name: array[i : i + 1] for name, array in batch.items()}) for i in range(samples)]


def evenly(array: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """At most `rows` vectors along the last axis of an array, evenly spaced, copied."""
    vectors = array.reshape(-1, array.shape[-1])
    chosen = np.linspace(0, len(vectors) - 1, min(rows, len(vectors))).astype(np.intp)
    return np.ascontiguousarray(vectors[chosen])


def _key(batch: Mapping[str, Array]) -> int:
    return int.from_bytes(hash_batch(batch), "big")


class CalibrationFeeds(Feeds):
    """Feeds that say where each batch comes from, and can leave out those whose inputs are not finite."""

    def read(self, skip: Callable[[int, str], None] | None) -> Iterator[tuple[int, str, Batch]]:
        """Number, origin and values of each batch.

        `skip` is told number and origin of each batch that holds NaN or infinity; without it they raise
        DataError, as everything else does that does not fit the model.
        """
        for number, raw in enumerate(self._source.batches()):
            if self._limit is not None and number >= self._limit:
                return
            if skip is not None and not _is_finite(raw):
                skip(number, raw.origin)
                continue
            yield number, raw.origin, checked(raw, self._inputs)

    def again(self, skip_bad: bool) -> Iterator[Batch]:
        """The batches, once a pass has named those to leave out: with `skip_bad` they are now, in silence."""
        return (batch for _, _, batch in self.read((lambda number, origin: None) if skip_bad else None))


def open_calibration_feeds(
    spec: str, inputs: Mapping[str, TensorInfo], limit: int | None, skip_bad: bool
) -> CalibrationFeeds:
    """Open the data that `spec` names, as `diag.feeds.open_feeds` does.

    With `skip_bad`, no batch is checked yet: the first may be one to leave out. Raises DataError and
    UsageError.
    """
    feeds = CalibrationFeeds(open_source(spec, inputs), inputs, limit)
    if not skip_bad:
        feeds.shapes()
    return feeds


def _is_finite(raw: RawBatch) -> bool:
    arrays = (np.asarray(value) for value in raw.values.values())
    return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")
