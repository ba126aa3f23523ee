"""Sums of float64 numbers that lose nothing: any order and any grouping give the same digits.

A float64 number is an integer times a power of two. Each sum is kept as digits of radix 2^32, each in an
int64 that has room for 2^30 additions before carries have to move on (a long accumulator, after U. Kulisch,
"Computer Arithmetic and Validity", 2008). All sums of an array share their digits' places, so that adding
two arrays of sums is one vector addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RADIX_BITS = 32
_MASK = np.int64((1 << _RADIX_BITS) - 1)
_HALF = np.int64(1 << (_RADIX_BITS - 1))
_MANTISSA_BITS = 53
_PARTS = 3
"""Digits that one float64 number touches: 53 bits, shifted by up to 31."""

Digits = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ExactSums:
    """Several sums: number i is the sum over k of digits[i, k] * 2^(32 (lowest + k)).

    Canonical: every digit lies in [-2^31, 2^31), and neither the first nor the last column is all zeros.
    """

    digits: Digits
    """Shape (sums, columns)."""
    lowest: int
    """Place of the first column."""

    @staticmethod
    def zeros(sums: int) -> ExactSums:
        return ExactSums(np.zeros((sums, 0), np.int64), 0)

    @staticmethod
    def of(values: NDArray[np.float64]) -> ExactSums:
        """Sums over the last axis. `values`: float64, shape (sums, n), finite, n below 2^28."""
        sums = values.shape[0]
        mantissas, exponents = np.frexp(values)
        integers = np.ldexp(mantissas, _MANTISSA_BITS).astype(np.int64)
        places, shifts = np.divmod(exponents.astype(np.int64) - _MANTISSA_BITS, _RADIX_BITS)
        used = integers != 0
        if not used.any():
            return ExactSums.zeros(sums)
        lowest = int(places[used].min())
        columns = int(places[used].max()) - lowest + _PARTS
        digits = np.zeros(sums * columns, np.int64)
        rows = np.broadcast_to(np.arange(sums)[:, None], values.shape)
        first = (rows * columns + places - lowest)[used]
        for part, digit in enumerate(_parts(integers[used], shifts[used])):
            np.add.at(digits, first + part, digit)
        return _canonical(digits.reshape(sums, columns), lowest)

    def __add__(self, other: ExactSums) -> ExactSums:
        """Sum by sum; both hold equally many."""
        return total((self, other))

    def fractions(self) -> list[Fraction]:
        """The sums as rational numbers."""
        unit = Fraction(2) ** (_RADIX_BITS * self.lowest)
        return [
            sum(int(digit) << (_RADIX_BITS * place) for place, digit in enumerate(row)) * unit
            for row in self.digits
        ]

    def floats(self) -> NDArray[np.float64]:
        """The sums rounded to float64 once, shape (sums,); infinite where they do not fit."""
        return np.array([_rounded(value) for value in self.fractions()], np.float64)


def total(parts: tuple[ExactSums, ...]) -> ExactSums:
    """Sum by sum over at least one array of sums, all of equally many; fewer than 2^30 arrays."""
    lowest = min((p.lowest for p in parts if p.digits.shape[1]), default=0)
    columns = max((p.lowest - lowest + p.digits.shape[1] for p in parts if p.digits.shape[1]), default=0)
    digits = np.zeros((parts[0].digits.shape[0], columns), np.int64)
    for part in parts:
        start = part.lowest - lowest
        if part.digits.shape[1]:
            digits[:, start : start + part.digits.shape[1]] += part.digits
    return _canonical(digits, lowest)


def _parts(integers: Digits, shifts: Digits) -> tuple[Digits, Digits, Digits]:
    """Three digits of integer * 2^shift, signed alike; |integer| < 2^53, 0 <= shift < 32."""
    signs, size = np.sign(integers), np.abs(integers)
    low, high = (size & _MASK) << shifts, (size >> _RADIX_BITS) << shifts
    middle = (low >> _RADIX_BITS) + (high & _MASK)
    return signs * (low & _MASK), signs * middle, signs * (high >> _RADIX_BITS)


def _canonical(digits: Digits, lowest: int) -> ExactSums:
    """Move carries on, and cut off empty columns. Takes `digits` over."""
    columns = [*digits.T.copy()]
    carry: Any = np.zeros(digits.shape[0], np.int64)
    place = 0
    while place < len(columns) or np.any(carry):
        column = carry if place == len(columns) else columns[place] + carry
        carry = (column + _HALF) >> _RADIX_BITS
        kept = column - (carry << _RADIX_BITS)
        columns[place : place + 1] = [kept]
        place += 1
    filled = [place for place, column in enumerate(columns) if np.any(column)]
    if not filled:
        return ExactSums.zeros(digits.shape[0])
    kept_columns = columns[filled[0] : filled[-1] + 1]
    return ExactSums(np.ascontiguousarray(np.stack(kept_columns, axis=1)), lowest + filled[0])


def _rounded(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
