"""The fixed bins in which values are counted, in steps of the calibrated scale (range / 127).

Inside the range four bins a step: bin k covers (k - 1, k] quarters of a step, so that the codes' boundaries,
which lie at odd halves, are edges too. Beyond it, on either side, eight bins an octave over 16 octaves (a
factor of 65,536); the outermost bins take everything beyond.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LAST_CODE = 127
QUARTERS = 4
"""Bins in a step."""
OCTAVES = 16
_IN_OCTAVE = 8

OUTER = OCTAVES * _IN_OCTAVE
"""Bins beyond the range, on each side."""
INNER = 2 * LAST_CODE * QUARTERS
BINS = INNER + 2 * OUTER

LOWEST = 1 - LAST_CODE * QUARTERS
"""Number of quarters at which the lowest bin inside the range ends."""
FIRST = OUTER - LOWEST
"""The bin that ends at zero, and holds zeros."""


def _edges() -> NDArray[np.float64]:
    beyond = LAST_CODE * np.exp2(np.arange(1, OUTER + 1) / _IN_OCTAVE)
    inside = np.arange(-LAST_CODE * QUARTERS, LAST_CODE * QUARTERS + 1) / QUARTERS
    return np.concatenate([-beyond[::-1], inside, beyond])


EDGES = _edges()
"""Edges of all bins in steps, shape (BINS + 1,); the first and the last are only nominal."""
EDGES.flags.writeable = False

_BEYOND = EDGES[OUTER + INNER : -1]


def bins_of(steps: NDArray[Any], over: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The bin of each value. `steps`: finite values in steps; `over`: which of them are beyond the range.

    Whether a value is beyond the range is decided before it is divided, so that the range itself never is.
    """
    quarters = np.clip(np.ceil(steps * QUARTERS), LOWEST, LAST_CODE * QUARTERS)
    found: NDArray[np.int64] = quarters.astype(np.int64) + FIRST
    outside = steps[over]
    place = np.maximum(np.searchsorted(_BEYOND, np.abs(outside), side="left"), 1)
    found[over] = np.where(outside > 0, OUTER + INNER - 1 + place, OUTER - place)
    return found
