"""The histogram by definition, and that it merges exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from definitions import bin_width, histogram
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from shapes import SHAPES

from diag.numerics.histogram import BINS, Histogram, bin_exponent, count

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(0, 50), elements=FLOATS)


def counted(values: np.ndarray) -> Histogram:
    return count(values, float(np.abs(values).max(initial=0)))[0]


@pytest.mark.parametrize("name", SHAPES)
def test_counts_by_definition(name):
    width, expected = histogram(SHAPES[name])
    found = counted(SHAPES[name])
    assert found.width == width
    np.testing.assert_array_equal(found.counts, expected)


@given(ARRAYS)
def test_counts_of_anything_by_definition(values):
    width, expected = histogram(values)
    found = counted(values)
    assert found.width == width
    np.testing.assert_array_equal(found.counts, expected)
    assert found.elements == values.size


@given(st.lists(ARRAYS, min_size=1, max_size=6), st.randoms())
def test_any_split_in_any_order_counts_the_same(parts, random):
    whole = counted(np.concatenate(parts))
    random.shuffle(parts)
    merged = Histogram()
    for part in parts:
        merged.add(counted(part))
    assert merged.exponent == whole.exponent
    np.testing.assert_array_equal(merged.counts, whole.counts)


@given(ARRAYS, ARRAYS, ARRAYS)
def test_merging_groups_freely(a, b, c):
    left, right, tail = counted(a), counted(a), counted(b)
    left.add(counted(b))
    left.add(counted(c))
    tail.add(counted(c))
    right.add(tail)
    np.testing.assert_array_equal(left.counts, right.counts)


@given(st.floats(min_value=2**-149, max_value=float(np.finfo(np.float32).max), width=32))
def test_the_width_is_the_smallest_that_fits(absmax):
    exponent = bin_exponent(absmax)
    assert math.ldexp(1.0, exponent) == bin_width(absmax)


def test_a_block_that_is_not_full_and_edges_between_blocks():
    for size in (1, 3, 32_767, 32_768, 32_769, 100_003):
        values = np.random.default_rng(size).normal(size=size).astype(np.float32)
        width = counted(values).width
        expected = np.bincount(np.ceil(np.abs(values).astype(float) / width).astype(int), minlength=BINS + 1)
        np.testing.assert_array_equal(counted(values).counts, expected)


def test_sums_of_squares_do_not_overflow_or_vanish():
    for name in ("tiny", "huge", "normal"):
        values = SHAPES[name].astype(np.float64)
        found, total, squares = count(SHAPES[name], float(np.abs(values).max()))
        assert squares * found.width * found.width == pytest.approx((values**2).sum(), rel=1e-5)
        assert total * found.width == pytest.approx(values.sum(), rel=1e-3, abs=1e-5 * np.abs(values).sum())


def test_zeros_have_no_width():
    found = counted(np.zeros(7, np.float32))
    assert (found.exponent, found.width, found.top, found.elements) == (None, 0.0, 0, 7)
    assert Histogram().elements == 0
