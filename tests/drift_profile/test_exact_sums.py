"""Exact sums: against rational arithmetic, in any grouping and any order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diag.numerics.exact import ExactSums, total

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.integers(1, 3).flatmap(
    lambda rows: st.lists(st.lists(FINITE, min_size=rows, max_size=rows), min_size=1, max_size=12)
)


def rational(values: np.ndarray) -> list[Fraction]:
    return [sum(map(Fraction, row.tolist()), Fraction()) for row in values]


def same(a: ExactSums, b: ExactSums) -> bool:
    return a.digits.tobytes() == b.digits.tobytes() and (a.lowest, a.digits.shape) == (
        b.lowest,
        b.digits.shape,
    )


@settings(max_examples=150, deadline=None)
@given(ROWS, st.randoms())
def test_sums_are_rational_arithmetic_in_any_order(columns, random):
    values = np.array(columns, np.float64).T
    whole = ExactSums.of(values)
    assert whole.fractions() == rational(values)
    parts = [ExactSums.of(values[:, i : i + 1]) for i in range(values.shape[1])]
    random.shuffle(parts)
    assert same(total(tuple(parts)), whole)
    cut = random.randint(0, len(parts))
    groups = [group for group in (parts[:cut], parts[cut:]) if group]
    assert same(total(tuple(total(tuple(group)) for group in groups)), whole)


def test_extremes_of_float64():
    tiny, huge = 5e-324, np.finfo(np.float64).max
    sums = ExactSums.of(np.array([[huge, huge, tiny, -huge, -huge], [1.0, 2.0**-60, -1.0, 0.0, -0.0]]))
    assert sums.floats().tolist() == [tiny, 2.0**-60]
    assert ExactSums.of(np.array([[huge, huge]])).floats().tolist() == [np.inf]
    assert ExactSums.of(np.array([[-huge, -huge]])).floats().tolist() == [-np.inf]


def test_sums_that_vanish_leave_nothing():
    one = ExactSums.of(np.array([[0.1, 0.2], [3.0, 4.0]]))
    minus = ExactSums.of(np.array([[-0.1, -0.2], [-3.0, -4.0]]))
    assert same(one + minus, ExactSums.zeros(2))
    assert ExactSums.zeros(2).floats().tolist() == [0.0, 0.0]


def test_many_additions_carry():
    ones = ExactSums.of(np.full((1, 100_000), (2.0**32 - 1) * 2.0**20))
    assert ones.fractions() == [100_000 * (2**32 - 1) * 2**20]
