"""Finds rows of one buffer in another, and the rule by which they lie there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Flat = NDArray[np.float64]

_WINDOW = 8
"""So many elements in a row tell it from all others."""
_ROWS = 32
"""So many rows are looked for, spread over the tensor."""
_LEAST_ROWS = 3
_SHARE = 0.9
"""Of the rows that the rule puts inside the buffer, so many must be there."""


@dataclass(frozen=True, slots=True)
class Law:
    """Row i, of `row` elements, lies at `offset + i * stride`."""

    row: int
    stride: int
    offset: int
    rows: int
    """Rows that were found there."""


def locate_rows(rows_of: Flat, buffer: Flat, row: int, noise_rel_l2: float) -> Law | None:
    """The rule by which rows of `rows_of` lie in `buffer`; None when there is none, or it is the rows' own.

    Both are flat; `row` is the number of elements of a row. Rows that look like others are passed over.
    """
    count = rows_of.size // row
    if row < _WINDOW or count < _LEAST_ROWS:
        return None
    tolerance = max(3 * noise_rel_l2, 1e-3) * float(np.sqrt(np.mean(np.square(rows_of))))
    chosen = np.unique(np.linspace(0, count - 1, min(count, _ROWS)).round().astype(np.int64))
    found = {
        int(i): at for i in chosen if (at := _find(rows_of, int(i) * row, buffer, tolerance)) is not None
    }
    if len(found) < _LEAST_ROWS:
        return None
    law = _rule(found, row)
    if law is None or (law.stride == row and law.offset == 0):
        return None
    inside = [i for i in chosen.tolist() if 0 <= law.offset + i * law.stride <= buffer.size - row]
    fitting = [i for i in inside if found.get(i) == law.offset + i * law.stride]
    if len(fitting) < max(_LEAST_ROWS, _SHARE * len(inside)):
        return None
    return Law(row, law.stride, law.offset, len(fitting))


def _find(rows_of: Flat, start: int, buffer: Flat, tolerance: float) -> int | None:
    """The one place in `buffer` where the window at `start` lies; None when there is none or several."""
    window = rows_of[start : start + _WINDOW]
    if np.ptp(window) <= 4 * tolerance:
        return None  # a constant is everywhere
    places: NDArray[Any] = np.flatnonzero(
        np.abs(buffer[: buffer.size - _WINDOW + 1] - window[0]) <= tolerance
    )
    for step in range(1, _WINDOW):
        places = places[np.abs(buffer[places + step] - window[step]) <= tolerance]
    return int(places[0]) if len(places) == 1 else None


def _rule(found: dict[int, int], row: int) -> Law | None:
    """The stride that most neighbouring finds agree on."""
    rows = sorted(found)
    strides = [
        (found[b] - found[a]) // (b - a) for a, b in pairwise(rows) if (found[b] - found[a]) % (b - a) == 0
    ]
    if not strides:
        return None
    stride = max(set(strides), key=strides.count)
    if stride <= 0 or strides.count(stride) < _LEAST_ROWS - 1:
        return None
    offsets = [at - i * stride for i, at in found.items()]
    return Law(row, stride, max(set(offsets), key=offsets.count), 0)
