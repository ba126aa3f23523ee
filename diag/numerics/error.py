"""Error of a tensor against its reference, as sums that add up over batches, processes and machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Double = NDArray[np.float64]

MASK_LIKE = 1e30
"""Reference values at or beyond this stand for minus infinity (attention masks); they are left out."""

_BLOCK_ELEMENTS = 1 << 16
"""Elements handled at a time, so that temporaries stay in the processor's cache."""

_SAFE_TOP, _SAFE_BOTTOM = 1e15, 1e-12
"""Beyond these a square may overflow or underflow float32; such blocks go through float64."""

_NEARLY_GONE = 0.1
"""Where the largest error is within this share of the largest reference, the candidate may have vanished, and
its energy is a small difference of large sums; such blocks go through float64 too."""

_WEIGHTY = 0.1
"""A collapsed row is lost when it had this share of the mean row's energy: behind a ReLU, a row of nearly
nothing may round to nothing."""

_Block = tuple[slice, slice, slice]


@dataclass(slots=True)
class ErrorSums:
    """Additive facts about `error = candidate - reference`, both finite; sums in float64 over float32 blocks.

    `reference_square` and `error_square` hold one sum for each channel.
    """

    reference_square: Double = field(default_factory=lambda: np.zeros(1))
    error_square: Double = field(default_factory=lambda: np.zeros(1))
    cross: float = 0.0
    """Sum of reference times error."""
    error_sum: float = 0.0
    elements: int = 0
    nonfinite: int = 0
    """Candidate elements that are NaN or infinite where the reference is finite; the infinity that a
    `MASK_LIKE` reference stands for is none of them."""
    nonfinite_reference: int = 0
    masked: int = 0
    """Other elements that enter no sum because the reference is `MASK_LIKE`."""
    zero_collapsed_rows: int = 0
    lost_rows: int = 0
    """Collapsed rows that carried weight: at least a tenth of the mean row's energy in the reference."""
    max_abs: float = 0.0
    max_abs_index: int = -1
    """Flat index of the largest absolute error in its batch."""
    reference_absmax: float = 0.0

    def add(self, other: ErrorSums) -> None:
        """Take in the sums of other data of the same tensor."""
        if other.elements == 0:
            return
        self._add_channels(other)
        self.cross += other.cross
        self.error_sum += other.error_sum
        self.elements += other.elements
        self.nonfinite += other.nonfinite
        self.nonfinite_reference += other.nonfinite_reference
        self.masked += other.masked
        self.zero_collapsed_rows += other.zero_collapsed_rows
        self.lost_rows += other.lost_rows
        self.reference_absmax = max(self.reference_absmax, other.reference_absmax)
        if other.max_abs > self.max_abs or self.max_abs_index < 0:
            self.max_abs, self.max_abs_index = other.max_abs, other.max_abs_index

    def _add_channels(self, other: ErrorSums) -> None:
        mine, theirs = self.reference_square, other.reference_square
        if self.elements == 0:
            self.reference_square, self.error_square = theirs.copy(), other.error_square.copy()
        elif mine.shape == theirs.shape:
            self.reference_square = mine + theirs
            self.error_square = self.error_square + other.error_square
        else:  # the number of channels depends on the data: only totals have a meaning
            self.reference_square = np.array([mine.sum() + theirs.sum()])
            self.error_square = np.array([self.error_square.sum() + other.error_square.sum()])


def channel_axis(rank: int, convolution: bool) -> int | None:
    """Axis that holds channels: 1 for convolutions and for rank 4 and more (or heads), else the last."""
    if rank < 2:
        return None
    return 1 if rank >= 4 or (convolution and rank == 3) else rank - 1


def measure(reference: Float, candidate: Float, axis: int | None) -> ErrorSums:
    """Sums for one tensor of one batch.

    Both arrays: float32, the same shape, any rank. `axis` is the channel axis, None for one channel.
    Elements where either side is not finite, or the reference is `MASK_LIKE`, count but enter no sum.
    """
    sums = ErrorSums(elements=reference.size)
    if reference.size == 0:
        return sums
    ref3, cand3 = _as_blocks(reference, axis), _as_blocks(candidate, axis)
    channels = ref3.shape[1]
    sums.reference_square, sums.error_square = np.zeros(channels), np.zeros(channels)
    for block, offset in _blocks(ref3.shape):
        _measure_block(sums, ref3[block], cand3[block], block[1], offset)
    _count_collapsed(sums, reference, candidate)
    return sums


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[_Block, int]]:
    """Contiguous parts of an (outer, channel, inner) array, each with the flat index of its first element."""
    outer, channels, inner = shape
    outer_step = _step(outer, channels * inner)
    channel_step = channels if channels * inner <= _BLOCK_ELEMENTS else _step(channels, inner)
    inner_step = inner if inner <= _BLOCK_ELEMENTS else _step(inner, 1)
    for n in range(0, outer, outer_step):
        for c in range(0, channels, channel_step):
            for i in range(0, inner, inner_step):
                block = slice(n, n + outer_step), slice(c, c + channel_step), slice(i, i + inner_step)
                yield block, (n * channels + c) * inner + i


def _step(count: int, size: int) -> int:
    """How many of `count` items of `size` elements make a block, so that the blocks are about equal."""
    blocks = min(count, -(-count * size // _BLOCK_ELEMENTS))
    return -(-count // blocks)


def _as_blocks(array: Float, axis: int | None) -> Float:
    """View as (outer, channel, inner)."""
    if axis is None:
        return array.reshape(-1, 1, 1) if array.ndim == 0 else array.reshape(1, 1, -1)
    shape = array.shape
    return array.reshape(
        int(np.prod(shape[:axis], dtype=np.int64)),
        shape[axis],
        int(np.prod(shape[axis + 1 :], dtype=np.int64)),
    )


def _measure_block(sums: ErrorSums, ref: Float, cand: Float, channels: slice, offset: int) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        top, bottom = float(ref.max()), float(ref.min())
        error = cand - ref
        error_top, error_bottom = float(error.max()), float(error.min())
    if not _plain(top, bottom, error_top, error_bottom):
        sums.reference_absmax = max(sums.reference_absmax, _real_absmax(ref))
        ref, cand = _finite_only(sums, ref, cand)
        error = cand - ref
        top, bottom = float(ref.max()), float(ref.min())
        error_top, error_bottom = float(error.max()), float(error.min())
    largest, worst = max(top, -bottom), max(error_top, -error_bottom)
    sums.reference_absmax = max(sums.reference_absmax, largest)
    if worst > sums.max_abs or sums.max_abs_index < 0:
        sums.max_abs = worst
        sums.max_abs_index = offset + int(error.argmax() if error_top >= -error_bottom else error.argmin())
    if _needs_double(largest, worst):
        _add_sums(sums, ref.astype(np.float64), cand.astype(np.float64) - ref, channels, worst)
    else:
        _add_sums(sums, ref, error, channels, worst)


def _needs_double(largest: float, worst: float) -> bool:
    """Whether float32 sums of squares would overflow, underflow, or cancel; given the largest magnitudes."""
    if largest == 0 and worst == 0:
        return False
    if not _SAFE_BOTTOM < largest < _SAFE_TOP or abs(worst - largest) <= _NEARLY_GONE * largest:
        return True
    return worst > _SAFE_TOP or 0 < worst < _SAFE_BOTTOM


def _add_sums(
    sums: ErrorSums, ref: Float | Double, error: Float | Double, channels: slice, worst: float
) -> None:
    sums.reference_square[channels] += _channel_dot(ref, ref)
    if worst > 0:
        sums.error_square[channels] += _channel_dot(error, error)
        # Not np.dot: BLAS shares it out over threads, which wait for cores that other work holds.
        flat = error.reshape(-1)
        sums.cross += float(np.einsum("i,i->", ref.reshape(-1), flat))
        sums.error_sum += float(np.einsum("i->", flat))


def _plain(top: float, bottom: float, error_top: float, error_bottom: float) -> bool:
    """Whether everything is finite (NaN propagates through max) and no value stands for infinity."""
    return max(top, -bottom) < MASK_LIKE and max(error_top, -error_bottom) < MASK_LIKE


def _real_absmax(ref: Float) -> float:
    """Largest finite magnitude that is no mask, whether or not the candidate could hold it."""
    magnitude = np.abs(ref)
    return float(np.where(magnitude < MASK_LIKE, magnitude, 0).max())


def _finite_only(sums: ErrorSums, ref: Float, cand: Float) -> tuple[Float, Float]:
    """Reference and candidate with every element that cannot be compared set to zero, and counted."""
    ref_finite, cand_finite = np.isfinite(ref), np.isfinite(cand)
    masked = ref_finite & (np.abs(ref) >= MASK_LIKE)
    agreed = masked & np.isinf(cand) & (np.signbit(ref) == np.signbit(cand))
    broken = ref_finite & ~cand_finite & ~agreed
    sums.nonfinite_reference += int(ref.size - np.count_nonzero(ref_finite))
    sums.nonfinite += int(np.count_nonzero(broken))
    sums.masked += int(np.count_nonzero(masked & ~broken))
    usable = ref_finite & cand_finite & ~masked
    return np.where(usable, ref, np.float32(0)), np.where(usable, cand, np.float32(0))


def _channel_dot(a: Float | Double, b: Float | Double) -> Double:
    if a.shape[2] == 1:
        flat = np.einsum("nc,nc->c", a[:, :, 0], b[:, :, 0])
        return np.asarray(flat, np.float64)
    per_row = np.einsum("ncs,ncs->nc", a, b)
    return np.asarray(per_row.sum(axis=0, dtype=np.float64))


def _count_collapsed(sums: ErrorSums, reference: Float, candidate: Float) -> None:
    rows = zero_collapsed_rows(reference, candidate)
    sums.zero_collapsed_rows = len(rows)
    if rows.size:
        energy = np.square(rows, dtype=np.float64).sum(axis=1)
        mean = sums.reference_square.sum() * reference.shape[-1] / reference.size
        sums.lost_rows = int(np.count_nonzero(energy >= _WEIGHTY * mean))


def zero_collapsed_rows(reference: Float, candidate: Float) -> Float:
    """The reference's rows (along the last axis) that are zero throughout in the candidate only."""
    width = reference.shape[-1] if reference.ndim else 0
    if width < 2:
        return np.zeros((0, width), np.float32)
    rows = candidate.reshape(-1, width)
    # A row can only be zero throughout when its first element is: a strided look spares most of the data.
    suspects = np.flatnonzero(rows[:, 0] == 0)
    if not suspects.size:
        return np.zeros((0, width), np.float32)
    collapsed = suspects[~rows[suspects].any(axis=1)]
    lost = reference.reshape(rows.shape)[collapsed]
    return lost[lost.any(axis=1)]
