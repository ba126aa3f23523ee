"""Counts one tensor of one batch: bins, extremes, and the sums of each request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.drift.bins import BINS, FIRST, LAST_CODE, LOWEST, QUARTERS, bins_of
from diag.drift.stats import HALVES, TALLIES, Tensor

Array = NDArray[Any]
Double = NDArray[np.float64]

_BLOCK = 1 << 15
"""Elements handled at a time, so that temporaries stay in the processor's cache."""
_LANES = 4
"""Neighbours are counted in different copies of the bins (see `diag.numerics.histogram`)."""
_LANE_BINS = np.tile(FIRST + BINS * np.arange(_LANES, dtype=np.int32), _BLOCK // _LANES)
_ONES = np.ones(_BLOCK, np.float32)
_LEAST_NORMAL = 2.0**-14
"""The smallest normal FP16 magnitude."""
_NEAR = 1 - 1e-6
"""From this share of the range on, rounding may take a value for one beyond it."""
_MOST_RANGES = 1e6
"""Values of so many ranges and more are counted in float64."""
_STEPS = 2.0**-100, 2.0**100
"""Steps whose reciprocals and quotients float32 holds without trouble."""

_Where = slice | NDArray[np.intp]
"""Requests, by row."""

FIGURES = ("sum", "energy", "noise", "clipped_energy", "clipped", "absmax")


@dataclass(slots=True)
class Rows:
    """One tensor of one batch; R requests, or one where it cannot be told by requests."""

    counts: NDArray[np.int64]
    """Shape (2, BINS)."""
    tallies: NDArray[np.int64]
    """Shape (2, len(TALLIES))."""
    extremes: Double
    """Shape (2, 2)."""
    elements: Double
    """Finite elements of each request, shape (R,)."""
    bad: NDArray[np.bool_]
    """Requests with elements that are not finite, shape (R,)."""
    figures: dict[str, Double]
    """`FIGURES` of each request in steps, shape (R,)."""


def count_tensor(array: Array, tensor: Tensor, halves: NDArray[np.intp]) -> Rows:
    """Count an array of any shape and numeric type; `halves` says in which half each request is, shape (R,).

    Integers of 32 bits and more and float64 are counted in float64, all others in float32. A request's sums
    add float32 sums of fixed blocks in float64.
    """
    rows = _by_request(_as_float(array), halves.size)
    return _Counter(tensor, rows, halves[: rows.shape[0]]).rows()


def not_seen(halves: NDArray[np.intp]) -> Rows:
    """What there is of a tensor that was not handed over."""
    nothing = np.zeros(halves.size)
    return Rows(
        np.zeros((HALVES, BINS), np.int64),
        np.zeros((HALVES, len(TALLIES)), np.int64),
        np.tile(np.array([np.inf, -np.inf]), (HALVES, 1)),
        nothing,
        nothing.astype(np.bool_),
        dict.fromkeys(FIGURES, nothing),
    )


def _as_float(array: Array) -> Array:
    wide = array.dtype.itemsize > 4 or (array.dtype.kind in "iu" and array.dtype.itemsize == 4)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, np.float64 if wide else np.float32)


def _by_request(array: Array, requests: int) -> Array:
    if array.ndim and array.size and array.shape[0] % requests == 0:
        return array.reshape(requests, -1)
    return array.reshape(1, -1)


class _Workspace:
    """Memory that blocks are worked on in."""

    def __init__(self) -> None:
        self.first, self.second = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        self.mask, self.short = np.empty(_BLOCK, np.bool_), np.empty(_BLOCK, np.int32)
        self.bins = np.empty(_BLOCK, np.int64)


class _Counter:
    def __init__(self, tensor: Tensor, rows: Array, halves: NDArray[np.intp]) -> None:
        self._values, self._halves, self._space = rows, halves, _Workspace()
        self._step, self._limit = tensor.step, rows.dtype.type(tensor.range)
        plain = rows.dtype == np.float32 and _STEPS[0] < tensor.step < _STEPS[1]
        self._most = np.float32(_MOST_RANGES * float(self._limit) if plain else 0)
        size = rows.shape[0]
        self._counts = np.zeros((HALVES, BINS), np.int64)
        self._tallies = {name: np.zeros(HALVES, np.int64) for name in TALLIES}
        self._low, self._high = np.full(size, np.inf), np.full(size, -np.inf)
        self._lost = np.zeros(size, np.int64)
        self._figures = {name: np.zeros(size) for name in FIGURES}

    def rows(self) -> Rows:
        lanes = np.zeros((HALVES, _LANES * BINS), np.int64)
        for where, block, half in self._blocks():
            self._count(where, block, half, lanes)
        self._counts += lanes.reshape(HALVES, _LANES, BINS).sum(axis=1)
        bad = self._lost > 0
        for half in range(HALVES):
            mine = self._halves == half
            self._tallies["requests"][half] = np.count_nonzero(mine)
            self._tallies["bad_requests"][half] = np.count_nonzero(bad & mine)
        self._figures["absmax"] = np.maximum(np.maximum(-self._low, self._high), 0) / self._step
        tallies = np.stack([self._tallies[name] for name in TALLIES], axis=1)
        elements = self._values.shape[1] - self._lost.astype(np.float64)
        return Rows(self._counts, tallies, self._extremes(), elements, bad, self._figures)

    def _extremes(self) -> Double:
        """Adding 0 makes -0 a 0, so that the order of the data leaves no trace."""
        found = np.tile(np.array([np.inf, -np.inf]), (HALVES, 1))
        for half in range(HALVES):
            mine = self._halves == half
            found[half, 0] = self._low[mine].min(initial=np.inf) + 0.0
            found[half, 1] = self._high[mine].max(initial=-np.inf) + 0.0
        return found

    def _blocks(self) -> Iterator[tuple[_Where, Array, int]]:
        """Requests, their values (r, c), and their half. Long requests come in several blocks."""
        width = self._values.shape[1]
        if width >= _BLOCK:
            for row, half in enumerate(self._halves.tolist()):
                for start in range(0, width, _BLOCK):
                    yield slice(row, row + 1), self._values[row : row + 1, start : start + _BLOCK], half
        elif width:
            for half in range(HALVES):
                mine = np.flatnonzero(self._halves == half)
                for start in range(0, mine.size, _BLOCK // width):
                    some = mine[start : start + _BLOCK // width]
                    where = slice(int(some[0]), int(some[0]) + 1) if some.size == 1 else some
                    yield where, self._values[where], half

    def _count(self, where: _Where, block: Array, half: int, lanes: NDArray[np.int64]) -> None:
        low, high = block.min(axis=1), block.max(axis=1)
        if not self._is_fast(low, high).all():
            where, block = self._without_odd(np.arange(self._low.size)[where], block, half)
            if not block.size:
                return
            low, high = block.min(axis=1), block.max(axis=1)
        self._widen(where, low, high)
        self._count_fast(where, block, half, (float(low.min()), float(high.max())), lanes)

    def _is_fast(self, low: Array, high: Array) -> NDArray[np.bool_]:
        """Which requests are counted in float32; none that holds NaN or infinity. Each by itself, so that
        its neighbours leave no trace in its sums."""
        return np.asarray(np.maximum(-low, high) < self._most)

    def _widen(self, where: _Where, low: Array, high: Array) -> None:
        self._low[where] = np.minimum(self._low[where], low)
        self._high[where] = np.maximum(self._high[where], high)

    def _without_odd(
        self, where: NDArray[np.intp], block: Array, half: int
    ) -> tuple[NDArray[np.intp], Array]:
        """The requests that float32 holds well. What is not finite and the other requests are counted."""
        low, high = block.min(axis=1), block.max(axis=1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            block, low, high = self._finite(where, block, half)
        self._widen(where, low, high)
        fast = self._is_fast(low, high)
        self._count_wide(where[~fast], block[~fast], half)
        return where[fast], block[fast]

    def _finite(
        self, where: NDArray[np.intp], block: Array, half: int
    ) -> tuple[Array, NDArray[Any], NDArray[Any]]:
        """The block with zeros for what is not finite, which is counted, and with extremes of the rest."""
        lost = ~np.isfinite(block)
        self._lost[where] += lost.sum(axis=1)
        self._tallies["nan"][half] += np.count_nonzero(np.isnan(block))
        self._tallies["positive_infinite"][half] += np.count_nonzero(block == np.inf)
        self._tallies["negative_infinite"][half] += np.count_nonzero(block == -np.inf)
        filled = int(np.count_nonzero(lost))
        self._counts[half, FIRST] -= filled
        self._tallies["zeros"][half] -= filled
        low, high = np.where(lost, np.inf, block).min(axis=1), np.where(lost, -np.inf, block).max(axis=1)
        return np.where(lost, block.dtype.type(0), block), low, high

    def _small(self, magnitudes: Array, half: int, mask: NDArray[np.bool_] | None = None) -> None:
        below = np.count_nonzero(np.less(magnitudes, _LEAST_NORMAL, out=mask))
        if below:
            zeros = np.count_nonzero(np.equal(magnitudes, 0, out=mask))
            self._tallies["zeros"][half] += zeros
            self._tallies["subnormals"][half] += below - zeros

    def _count_fast(
        self,
        where: _Where,
        block: Array,
        half: int,
        ends: tuple[float, float],
        lanes: NDArray[np.int64],
    ) -> None:
        """In float32. The last code takes what lies at the end of the range, and beyond."""
        x = block.reshape(-1)
        y, z = self._space.first[: x.size], self._space.second[: x.size]
        mask, bins = self._space.mask[: x.size], self._space.bins[: x.size]
        np.abs(x, out=z)
        self._small(z, half, mask)
        if max(-ends[0], ends[1]) > self._limit:
            self._count_over(where, block, half, np.flatnonzero(np.greater(z, self._limit, out=mask)))
        np.multiply(x, np.float32(1 / self._step), out=y)
        self._figures["sum"][where] += _sums(y.reshape(block.shape))
        self._figures["energy"][where] += _squares(y.reshape(block.shape))
        np.rint(y, out=z)
        self._hold(z, ends, -LAST_CODE, LAST_CODE)
        np.subtract(y, z, out=z)
        self._figures["noise"][where] += _squares(z.reshape(block.shape))
        np.multiply(x, np.float32(QUARTERS / self._step), out=z)
        np.ceil(z, out=z)
        self._hold(z, ends, LOWEST, LAST_CODE * QUARTERS)
        short = self._space.short[: x.size]
        np.copyto(short, z, casting="unsafe")  # by way of 32 bits, which is faster
        np.add(short, _LANE_BINS[: x.size], out=bins)
        lanes[half] += np.bincount(bins, minlength=_LANES * BINS)

    def _hold(self, values: Array, ends: tuple[float, float], lowest: int, highest: int) -> None:
        """Clip, on the sides where the data reach the end of the range."""
        near = _NEAR * float(self._limit)
        if ends[0] <= -near:
            np.maximum(values, lowest, out=values)
        if ends[1] >= near:
            np.minimum(values, highest, out=values)

    def _count_over(self, where: _Where, block: Array, half: int, over: NDArray[np.intp]) -> None:
        """Move what lies beyond the range from the last bins inside it to where it belongs."""
        requests, width = block.shape
        rows, steps = over // width, block.reshape(-1)[over] / self._step
        beyond = np.maximum(np.abs(steps) - LAST_CODE, 0)
        self._figures["clipped_energy"][where] += np.bincount(rows, beyond * beyond, requests)
        self._figures["clipped"][where] += np.bincount(rows, minlength=requests)
        places = bins_of(steps, np.ones(steps.size, np.bool_))
        self._counts[half] += np.bincount(places, minlength=BINS)
        above = np.count_nonzero(steps > 0)
        self._counts[half, FIRST + LAST_CODE * QUARTERS] -= above
        self._counts[half, FIRST + LOWEST] -= steps.size - above

    def _count_wide(self, where: NDArray[np.intp], block: Array, half: int) -> None:
        """In float64, for what float32 does not hold well."""
        magnitudes = np.abs(block)
        self._small(magnitudes, half)
        y, over = block.astype(np.float64) / self._step, magnitudes > self._limit
        beyond = np.where(over, np.maximum(np.abs(y) - LAST_CODE, 0), 0)
        noise = y - np.clip(np.rint(y), -LAST_CODE, LAST_CODE)
        self._figures["sum"][where] += y.sum(axis=1)
        self._figures["energy"][where] += _squares(y)
        self._figures["noise"][where] += _squares(noise)
        self._figures["clipped_energy"][where] += _squares(beyond)
        self._figures["clipped"][where] += over.sum(axis=1)
        self._counts[half] += np.bincount(bins_of(y, over).reshape(-1), minlength=BINS)


_LONG = _BLOCK // 4
"""From this length on rows are summed one by one; the way depends on a row's length only."""


def _sums(block: Array) -> Array:
    if block.shape[1] >= _LONG:
        return np.array([np.dot(row, _ONES[: row.size]) for row in block])
    return np.asarray(np.add.reduce(block, axis=1))


def _squares(block: Array) -> Array:
    if block.shape[1] >= _LONG:
        return np.array([np.dot(row, row) for row in block])
    return np.asarray(np.einsum("ij,ij->i", block, block))
