"""Values right, places wrong: finds the rearrangement that turns the reference into what an engine gave.

Stride, transpose and batch-offset faults keep the values and move them, so statistics stay silent: standard
deviations move by a percent while single elements have nothing to do with the reference. Here one candidate
rearrangement after the other is tried, and the one that removes the error names the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diag.compare.windows import Law, locate_rows

Array = NDArray[Any]
Flat = NDArray[np.float64]
Index = NDArray[np.int64]

Kind = Literal["rows", "roll", "row_roll", "transpose", "reshape", "stride", "offset", "values_moved"]

MAX_RANK = 5
_LEAST_REL_L2 = 0.05
"""Below this nothing was moved: a rearrangement changes more."""
_NOISE_FACTOR = 5.0
_EXPLAINED = 0.02
"""A rearrangement explains the error when less than this is left (or three times the noise)."""
_SAMPLE = 4096
_MOST_ROWS = 512
_LARGEST_ROW = 1 << 22
_LARGEST_SPLIT = 1 << 16
"""An axis longer than this is not seen as two."""


@dataclass(frozen=True)
class Layout:
    """The rearrangement that was found."""

    kind: Kind
    text: str
    rel_l2: float
    """Engine against reference, element by element."""
    explained_rel_l2: float
    """What is left once the reference is rearranged; of the elements that the rearrangement speaks of."""
    sorted_rel_l2: float
    """The same with the values of both sorted: small when only places differ."""
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class _Move:
    """A rearrangement: where in the flat reference the value at each flat position comes from."""

    kind: Kind
    text: str
    source: Callable[[Index], Index]
    parameters: Mapping[str, object] = field(default_factory=dict)


def fingerprint(reference: Array, candidate: Array, noise_rel_l2: float = 1e-3) -> Layout | None:
    """What moved the values of one output of one batch; None when nothing did, or nothing explains it.

    Both arrays have one shape, of rank 5 or less (more: only rows are looked at). `noise_rel_l2` is the error
    that is to be expected: the format's, or a rebuild's. Rows that are right are left out of the search.
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"shapes differ: {reference.shape} and {candidate.shape}")
    ref, cand = _flat(reference), _flat(candidate)
    before = _rel_l2(ref, cand)
    if not before > max(_LEAST_REL_L2, _NOISE_FACTOR * noise_rel_l2):
        return None
    allowed = min(max(3 * noise_rel_l2, _EXPLAINED), before / _NOISE_FACTOR)
    wrong = _wrong_rows(ref, cand, reference.shape, allowed)
    where = _where(wrong, reference.shape)
    sorted_gap = _rel_l2(np.sort(ref), np.sort(cand))
    positions = _positions(wrong, ref.size, reference.shape)
    for move in _moves(ref, cand, reference.shape):
        left = _left(move, ref, cand, positions, allowed)
        if left <= allowed:
            return Layout(move.kind, move.text + where, before, left, sorted_gap, move.parameters)
    found = _by_windows(ref, cand, reference.shape, noise_rel_l2)
    if found is not None:
        kind, text, law = found
        parameters = {"row": law.row, "stride": law.stride, "offset": law.offset, "rows_found": law.rows}
        return Layout(kind, text, before, 0.0, sorted_gap, parameters)
    return _values_moved(ref.size, before, sorted_gap, noise_rel_l2)


def _values_moved(size: int, before: float, sorted_gap: float, noise: float) -> Layout | None:
    """Two samples of one distribution agree when sorted, to about 2 / sqrt(n): only closer is a proof."""
    if sorted_gap > min(1.5 * max(noise, 1e-4), 0.5 / np.sqrt(size)):
        return None
    text = "the values are the reference's and stand in other places; no simple rearrangement explains it"
    return Layout("values_moved", text, before, before, sorted_gap)


def _flat(array: Array) -> Flat:
    values = np.asarray(array, np.float64).reshape(-1)
    return np.where(np.isfinite(values), values, 0.0)


def _rel_l2(reference: Flat, other: Flat) -> float:
    energy = float(np.dot(reference, reference))
    error = other - reference
    return float(np.sqrt(np.dot(error, error) / energy)) if energy > 0 else 0.0


def _wrong_rows(ref: Flat, cand: Flat, shape: tuple[int, ...], allowed: float) -> Index:
    rows = shape[0] if len(shape) > 1 else 1
    pairs = zip(ref.reshape(rows, -1), cand.reshape(rows, -1), strict=True)
    return np.array([i for i, (a, b) in enumerate(pairs) if _rel_l2(a, b) > allowed], np.int64)


def _where(wrong: Index, shape: tuple[int, ...]) -> str:
    if len(shape) < 2 or len(wrong) == shape[0]:
        return ""
    shown = ", ".join(map(str, wrong[:6])) + (", ..." if len(wrong) > 6 else "")
    return f"; so in {len(wrong)} of {shape[0]} rows ({shown}), the others are right"


def _positions(wrong: Index, size: int, shape: tuple[int, ...]) -> Index:
    """A sample of flat positions in the rows that are wrong; all where there are few."""
    rows = shape[0] if len(shape) > 1 else 1
    width = size // rows
    if len(wrong) * width <= _SAMPLE:
        return np.asarray((wrong[:, None] * width + np.arange(width)).reshape(-1), np.int64)
    generator = np.random.default_rng(0)
    row = generator.choice(wrong, _SAMPLE)
    return np.asarray(row * width + generator.integers(0, width, _SAMPLE), np.int64)


def _left(move: _Move, ref: Flat, cand: Flat, positions: Index, allowed: float) -> float:
    """Relative L2 that is left; a move that fails on a few positions is not tried on all."""
    few = positions[:: max(len(positions) // 256, 1)]
    left = _rel_l2(ref[move.source(few)], cand[few])
    return left if left > 2 * allowed else _rel_l2(ref[move.source(positions)], cand[positions])


def _moves(ref: Flat, cand: Flat, shape: tuple[int, ...]) -> Iterator[_Move]:
    """Rearrangements, the simplest first."""
    if len(shape) > 1:
        yield from _row_orders(ref, cand, shape)
    if len(shape) <= MAX_RANK:
        yield from _rolls(ref, cand, shape)
        yield from _transposes(shape)
    if len(shape) > 1:
        yield from _row_rolls(ref, cand, shape)
    for parts in _split_axes(shape):
        yield from _transposes(parts)


def _row_orders(ref: Flat, cand: Flat, shape: tuple[int, ...]) -> Iterator[_Move]:
    """Rows of the batch in another order, or one row in place of others."""
    rows = shape[0]
    if not 1 < rows <= _MOST_ROWS:
        return
    width = ref.size // rows
    a, b = (_unit(x.reshape(rows, width)) for x in (ref, cand))
    order = np.asarray((b @ a.T).argmax(axis=1), np.int64)
    if np.array_equal(order, np.arange(rows)):
        return
    step = int(order[0]) % rows
    if np.array_equal(order, (np.arange(rows) + step) % rows):
        text = f"each row of the batch holds the row {step} further on: the batch is read at an offset"
    elif len(set(order.tolist())) == 1:
        text = f"every row of the batch holds row {order[0]}"
    else:
        shown = ", ".join(f"{i} holds {j}" for i, j in enumerate(order.tolist()) if i != j)
        text = f"rows of the batch are exchanged: {shown[:120]}"

    def source(at: Index) -> Index:
        return np.asarray(order[at // width] * width + at % width, np.int64)

    yield _Move("rows", text, source, {"order": order.tolist()})


def _unit(rows: Flat) -> Flat:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1.0))


def _rolls(ref: Flat, cand: Flat, shape: tuple[int, ...]) -> Iterator[_Move]:
    """All of the tensor rolled along one axis."""
    for axis, size in enumerate(shape):
        if size < 2 or ref.size > _LARGEST_ROW:
            continue
        shift = _shift(ref.reshape(shape), cand.reshape(shape), axis)
        if shift:
            text = f"everything is rolled by {_signed(shift, size)} along axis {axis}"
            yield _Move("roll", text, _rolled(shape, axis, shift), {"axis": axis, "shift": shift})


def _shift(reference: Array, candidate: Array, axis: int) -> int:
    """The roll along `axis` that fits best, by correlation over the whole tensor."""
    spectrum = np.fft.rfft(candidate, axis=axis) * np.conj(np.fft.rfft(reference, axis=axis))
    others = tuple(a for a in range(reference.ndim) if a != axis)
    return int(np.fft.irfft(spectrum.sum(axis=others), n=reference.shape[axis]).argmax())


def _signed(shift: int, size: int) -> int:
    return shift if shift <= size // 2 else shift - size


def _rolled(shape: tuple[int, ...], axis: int, shift: int) -> Callable[[Index], Index]:
    def source(at: Index) -> Index:
        coordinates = list(np.unravel_index(at, shape))
        coordinates[axis] = (coordinates[axis] - shift) % shape[axis]
        return np.asarray(np.ravel_multi_index(coordinates, shape), np.int64)

    return source


def _split_axes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shape with one axis seen as two: heads times their width, height times width."""
    for axis in reversed(range(len(shape))):
        if len(shape) >= MAX_RANK or shape[axis] > _LARGEST_SPLIT:
            continue
        for part in range(2, shape[axis] // 2 + 1):
            if shape[axis] % part == 0:
                yield (*shape[:axis], part, shape[axis] // part, *shape[axis + 1 :])


def _transposes(shape: tuple[int, ...]) -> Iterator[_Move]:
    """Axes exchanged: the transposed buffer read in the old shape, or the buffer read as if transposed."""
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    for order in permutations(range(len(shape))):
        if [a for a in order if shape[a] > 1] == wide:
            continue
        permuted = tuple(shape[a] for a in order)
        parameters = {"order": order}
        text = f"the reference transposed by {order} and read as {shape}: a transpose is lost or done twice"
        yield _Move("transpose", text, _read_transposed(shape, order), parameters)
        text = (
            f"the reference's buffer read as {permuted} and transposed back to {shape}: "
            "a reshape between permuted shapes"
        )
        yield _Move("reshape", text, _read_as(shape, order), parameters)


def _read_transposed(shape: tuple[int, ...], order: tuple[int, ...]) -> Callable[[Index], Index]:
    """Source of `reference.transpose(order).reshape(shape)`."""

    def source(at: Index) -> Index:
        coordinates = np.unravel_index(at, tuple(shape[a] for a in order))
        original = [coordinates[order.index(axis)] for axis in range(len(shape))]
        return np.asarray(np.ravel_multi_index(original, shape), np.int64)

    return source


def _read_as(shape: tuple[int, ...], order: tuple[int, ...]) -> Callable[[Index], Index]:
    """Source of `reference.reshape(shape[order])`, transposed back to `shape`."""

    def source(at: Index) -> Index:
        coordinates = np.unravel_index(at, shape)
        permuted = tuple(shape[a] for a in order)
        return np.asarray(np.ravel_multi_index([coordinates[a] for a in order], permuted), np.int64)

    return source


def _row_rolls(ref: Flat, cand: Flat, shape: tuple[int, ...]) -> Iterator[_Move]:
    """Each row of the batch rolled by a number of its own: a wrong stride between rows."""
    rows, width = shape[0], ref.size // shape[0]
    if not 1 <= rows <= _MOST_ROWS or not 1 < width <= _LARGEST_ROW:
        return
    for axis in range(1, len(shape)):
        yield from _row_rolls_of(ref.reshape(shape), cand.reshape(shape), axis)
    if len(shape) > 2:
        yield from _row_rolls_of(ref.reshape(rows, width), cand.reshape(rows, width), 1)


def _row_rolls_of(ref: Array, cand: Array, axis: int) -> Iterator[_Move]:
    pairs = zip(ref, cand, strict=True)
    shifts = np.array([_shift(a, b, axis - 1) for a, b in pairs], np.int64)
    if not shifts.any():
        return
    shape, size = ref.shape, ref.shape[axis]
    step = _signed(int(shifts[1 % len(shifts)]), size)
    along = f"axis {axis}" if ref.ndim > 2 else "the row"
    if np.array_equal(shifts, np.arange(len(shifts)) * step % size):
        text = f"row b of the batch is rolled by {step} times b along {along}: the rows' stride is wrong"
    else:
        shown = ", ".join(str(_signed(int(s), size)) for s in shifts[:6])
        text = f"rows of the batch are rolled along {along}, each by its own shift ({shown} ...)"

    def source(at: Index) -> Index:
        coordinates = list(np.unravel_index(at, shape))
        coordinates[axis] = (coordinates[axis] - shifts[coordinates[0]]) % size
        return np.asarray(np.ravel_multi_index(coordinates, shape), np.int64)

    yield _Move("row_roll", text, source, {"shifts": shifts.tolist(), "axis": axis})


def _by_windows(ref: Flat, cand: Flat, shape: tuple[int, ...], noise: float) -> tuple[Kind, str, Law] | None:
    """Rows found at other places than their own, by a rule: stride or offset."""
    for split in range(len(shape) - 1, 0, -1):
        row = int(np.prod(shape[split:], dtype=np.int64))
        law = locate_rows(ref, cand, row, noise)
        if law is not None:
            return _stride_words(law, "the reference's rows", "a strided view was read as dense")
        law = locate_rows(cand, ref, row, noise)
        if law is not None:
            return _stride_words(law, "the engine's rows", "a dense tensor was read with another stride")
    return None


def _stride_words(law: Law, whose: str, meaning: str) -> tuple[Kind, str, Law]:
    if law.stride == law.row:
        other = "reference" if "engine" in whose else "engine"
        return "offset", f"{whose} of {law.row} lie {law.offset:+d} elements off in the {other}'s buffer", law
    text = (
        f"{whose} of {law.row} elements lie {law.stride} apart (offset {law.offset}, {law.rows} rows found): "
        f"{meaning}"
    )
    return "stride", text, law
