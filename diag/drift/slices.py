"""Requests by slice: a batch is taken apart by the names that its requests bear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.drift.accumulate import Requests, requests_of
from diag.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SlicePart:
    """The requests of one batch that belong to one slice, and the tensors' values on them."""

    name: str
    values: Mapping[str, Array]
    requests: Requests


def split_by_slice(
    batch: Mapping[str, Array], values: Mapping[str, Array], label: str, slices: Iterator[str] | None
) -> list[SlicePart]:
    """Take a batch of inputs and its tensors' values apart.

    `slices` gives the slice of each request (None: all are one). A tensor whose first axis is no multiple of
    the number of requests cannot be told by requests, and goes with the first of them.

    Raises DataError when there are fewer names than requests.
    """
    requests = requests_of(batch, label)
    if slices is None:
        return [SlicePart("", values, requests)]
    size = len(requests.labels)
    names = list(islice(slices, size))
    if len(names) < size:
        raise DataError(
            f"the slices end before the requests do, in {label}", "Name the slice of every request, in order."
        )
    if len(set(names)) == 1:
        return [SlicePart(names[0], values, requests)]
    return [_part(name, np.array(names) == name, batch, values, requests) for name in dict.fromkeys(names)]


def _part(
    name: str,
    mine: NDArray[np.bool_],
    batch: Mapping[str, Array],
    values: Mapping[str, Array],
    requests: Requests,
) -> SlicePart:
    labels = [text for text, chosen in zip(requests.labels, mine, strict=True) if chosen]
    inputs = {key: array[mine] for key, array in batch.items()}
    return SlicePart(
        name, {key: _rows(array, mine) for key, array in values.items()}, requests_of(inputs, labels)
    )


def _rows(array: Array, mine: NDArray[np.bool_]) -> Array:
    """The rows of these requests; all or nothing of an array that cannot be told by requests."""
    if array.ndim and array.size and array.shape[0] % mine.size == 0:
        return np.asarray(array.reshape(mine.size, -1, *array.shape[1:])[mine].reshape(-1, *array.shape[1:]))
    return array if mine[0] else np.asarray(array.reshape(-1)[:0])
