"""Error sums against the definition in float64: any shape, any magnitude, anything that is not a number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sums_by_hand import collapsed_by_hand, sums_by_hand

from diag.numerics import error
from diag.numerics.error import MASK_LIKE, ErrorSums, channel_axis, measure

COUNTS = ("elements", "nonfinite", "nonfinite_reference", "masked", "zero_collapsed_rows")
MAGNITUDES = [1e-38, 1e-25, 1e-12, 1e-3, 1.0, 1e4, 1e12, 1e20, 9e29]
SPECIAL = [np.nan, np.inf, -np.inf, -3.4028235e38, 3.4e38, -1e30, 0.0, -0.0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int | None]:
    """A reference, a candidate and a channel axis; NaN, infinities, masks and zeros on either side."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=1, max_side=5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scales = draw(st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=3))
    reference = rng.standard_normal(shape) * rng.choice(scales, shape) / 8
    noise = draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 30.0, -1.0]))
    candidate = reference * (1 + noise * (rng.standard_normal(shape) if noise != -1 else 1))
    share = draw(st.tuples(*[st.sampled_from([0.0, 0.0, 0.1, 0.6])] * 2))
    reference = np.where(rng.random(shape) < share[0], rng.choice(SPECIAL, shape), reference)
    candidate = np.where(rng.random(shape) < share[1], rng.choice(SPECIAL, shape), candidate)
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    with np.errstate(over="ignore"):
        return reference.astype(np.float32), candidate.astype(np.float32), axis


def assert_close(sums: ErrorSums, expected: dict[str, object], tolerance: float = 1e-4) -> None:
    signal, noise = np.asarray(expected["reference_square"]), np.asarray(expected["error_square"])
    for found, wanted in ((sums.reference_square, signal), (sums.error_square, noise)):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-12 * wanted.sum())
    product = float(np.sqrt(signal.sum()) * np.sqrt(noise.sum()))
    assert sums.cross == pytest.approx(expected["cross"], rel=0, abs=tolerance * product)
    assert sums.error_sum == pytest.approx(expected["error_sum"], rel=0, abs=tolerance * expected["error_l1"])  # type: ignore[operator]
    assert sums.max_abs == pytest.approx(expected["max_abs"], rel=1e-6, abs=0)
    assert sums.reference_absmax == expected["reference_absmax"]


@given(cases())
def test_sums_are_those_of_the_definition(case: tuple[np.ndarray, np.ndarray, int | None]) -> None:
    reference, candidate, axis = case
    expected = sums_by_hand(reference, candidate, axis)
    sums = measure(reference, candidate, axis)
    assert_close(sums, expected)
    for name in COUNTS[:-1]:
        assert getattr(sums, name) == expected[name], name
    assert sums.zero_collapsed_rows == collapsed_by_hand(reference, candidate)
    at_worst = abs(float(np.asarray(expected["errors"]).reshape(-1)[sums.max_abs_index]))
    assert at_worst == pytest.approx(expected["max_abs"], rel=1e-6, abs=0)


@given(cases(), st.integers(1, 30))
def test_blocks_of_any_size_give_the_same(case: tuple[np.ndarray, np.ndarray, int | None], size: int) -> None:
    reference, candidate, axis = case
    expected = sums_by_hand(reference, candidate, axis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error, "_BLOCK_ELEMENTS", size)
        sums = measure(reference, candidate, axis)
    assert_close(sums, expected)
    for name in COUNTS[:-1]:
        assert getattr(sums, name) == expected[name], name
    at_worst = abs(float(np.asarray(expected["errors"]).reshape(-1)[sums.max_abs_index]))
    assert at_worst == pytest.approx(expected["max_abs"], rel=1e-6, abs=0)


@given(cases(), st.data())
def test_batches_split_and_merged_in_any_way_equal_one_run(
    case: tuple[np.ndarray, np.ndarray, int | None], data: st.DataObject
) -> None:
    reference, candidate, axis = case
    if reference.ndim < 2 or axis == 0:  # the last axis holds rows, which no batch cuts
        reference, candidate = reference[np.newaxis], candidate[np.newaxis]
        axis = None if axis is None else axis + 1
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reference)), max_size=4)))
    parts = list(zip(np.split(reference, cuts), np.split(candidate, cuts), strict=True))
    measured = [measure(np.ascontiguousarray(r), np.ascontiguousarray(c), axis) for r, c in parts]
    order = data.draw(st.permutations(measured))
    half = data.draw(st.integers(0, len(order)))
    merged = merge([merge(order[:half]), merge(order[half:])])
    whole = measure(reference, candidate, axis)
    for name in COUNTS:
        assert getattr(merged, name) == getattr(whole, name), name
    assert (merged.max_abs, merged.reference_absmax) == (whole.max_abs, whole.reference_absmax)
    assert_close(merged, sums_by_hand(reference, candidate, axis))


def merge(parts: list[ErrorSums]) -> ErrorSums:
    total = ErrorSums()
    for part in parts:
        total.add(part)
    return total


def test_an_empty_batch_changes_nothing() -> None:
    full = np.arange(24, dtype=np.float32).reshape(4, 6)
    empty = np.zeros((0, 6), np.float32)
    for order in ((full, empty), (empty, full)):
        total = merge([measure(a, a + np.float32(0.5), 1) for a in order])
        assert total.error_square.tolist() == [1.0] * 6  # channels survive: 4 rows of 0.25 each
        assert total.elements == 24


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 4), (1, 3, 0, 0)])
def test_nothing_to_compare_is_no_error(shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.float32)
    sums = measure(empty, empty, channel_axis(len(shape), False))
    assert (sums.elements, sums.max_abs, sums.max_abs_index, sums.zero_collapsed_rows) == (0, 0.0, -1, 0)


def test_channels_whose_number_depends_on_the_data_leave_only_totals() -> None:
    one = np.ones((2, 3), np.float32)
    two = np.ones((2, 5), np.float32)
    parts = [measure(a, a + 1, 1) for a in (one, two, one)]
    for order in (parts, parts[::-1]):
        total = merge(order)
        assert total.reference_square.tolist() == [22.0]
        assert total.error_square.tolist() == [22.0]


def test_merging_leaves_the_merged_alone() -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((4, 3)).astype(np.float32)
    part = measure(a, a * 2, 1)
    before = asdict(part)
    total = merge([part, part])
    assert total.elements == 24
    for name, value in asdict(part).items():
        assert np.array_equal(value, before[name]), name


def test_the_infinity_that_a_mask_stands_for_is_no_error() -> None:
    reference = np.array([-3.4028235e38, -1e30, 1.0, 2.0], np.float32)
    candidate = np.array([-np.inf, -65504, 1.0, 2.5], np.float32)
    sums = measure(reference, candidate, None)
    assert (sums.nonfinite, sums.masked, sums.max_abs, sums.max_abs_index) == (0, 2, 0.5, 3)
    assert sums.reference_square.tolist() == [5.0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_or_the_wrong_infinity_at_a_mask_is_an_error(value: float) -> None:
    reference = np.array([-3.4028235e38, 1.0], np.float32)
    sums = measure(reference, np.array([value, 1.0], np.float32), None)
    assert (sums.nonfinite, sums.masked) == (1, 0)


def test_just_below_a_mask_counts_as_a_value() -> None:
    reference = np.array([np.nextafter(np.float32(MASK_LIKE), np.float32(0))], np.float32)
    sums = measure(reference, np.zeros(1, np.float32), None)
    assert (sums.masked, sums.max_abs) == (0, float(reference[0]))


@pytest.mark.parametrize("shape", [(2, 3, 5), (130, 700), (1, 4, 300, 300), (200_000,)])
@pytest.mark.parametrize("where", [0.0, 0.37, 0.999999])
def test_the_worst_element_is_found_by_its_flat_index(shape: tuple[int, ...], where: float) -> None:
    rng = np.random.default_rng(2)
    reference = rng.standard_normal(shape).astype(np.float32)
    candidate = reference + rng.standard_normal(shape).astype(np.float32) * np.float32(1e-3)
    index = int(where * reference.size)
    for sign in (1, -1):
        candidate.reshape(-1)[index] = reference.reshape(-1)[index] + sign * 9
        sums = measure(reference, candidate, channel_axis(len(shape), False))
        assert sums.max_abs_index == index
        assert sums.max_abs == pytest.approx(9, rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 3, 640, 640), (3_000_000,), (65536, 1)])
def test_long_sums_keep_four_digits(shape: tuple[int, ...]) -> None:
    reference = np.full(shape, 1 / 3, np.float32)
    candidate = reference * np.float32(1.01)
    sums = measure(reference, candidate, channel_axis(len(shape), False))
    assert_close(sums, sums_by_hand(reference, candidate, channel_axis(len(shape), False)), 1e-4)


def test_errors_far_below_float32_squares_are_still_errors() -> None:
    reference = np.array([1.0, 1e-30], np.float32)
    sums = measure(reference, np.array([1.0, 3e-30], np.float32), None)
    assert sums.error_square.tolist() == pytest.approx([4e-60], rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("rank", "convolution", "axis"),
    [
        (0, False, None),
        (1, False, None),
        (2, False, 1),
        (3, False, 2),
        (3, True, 1),
        (4, False, 1),
        (5, True, 1),
    ],
)
def test_channel_axes(rank: int, convolution: bool, axis: int | None) -> None:
    assert channel_axis(rank, convolution) == axis


def test_rows_collapse_only_when_the_reference_had_something() -> None:
    reference = np.array([[0, 0], [0, 2], [1, 0], [3, 4], [np.nan, 0]], np.float32)
    candidate = np.array([[0, 0], [0, 0], [0, -0.0], [0, 4], [0, 0]], np.float32)
    assert measure(reference, candidate, 1).zero_collapsed_rows == 3
    columns = np.ones((4, 1), np.float32)
    assert measure(columns, columns * 0, 1).zero_collapsed_rows == 0  # one element is no row


SCALES: list[Callable[[np.ndarray], np.ndarray]] = [
    functools.partial(np.multiply, np.float32(s)) for s in (1e-20, 1e-6, 1e6, 1e20)
]


@pytest.mark.parametrize("scale", SCALES)
def test_magnitude_does_not_change_relative_sums(scale: Callable[[np.ndarray], np.ndarray]) -> None:
    rng = np.random.default_rng(3)
    reference = rng.standard_normal((40, 20)).astype(np.float32)
    candidate = reference + rng.standard_normal((40, 20)).astype(np.float32) * np.float32(0.01)
    plain, scaled = (measure(f(reference), f(candidate), 1) for f in (np.asarray, scale))
    ratios = [s.error_square / s.reference_square for s in (plain, scaled)]
    np.testing.assert_allclose(*ratios, rtol=1e-4)


def test_a_collapsed_row_is_lost_only_when_it_carried_weight() -> None:
    reference = np.ones((10, 4), np.float32)
    reference[3] = 0.01  # a ten-thousandth of the other rows' energy
    candidate = reference.copy()
    candidate[[3, 5]] = 0
    sums = measure(reference, candidate, 1)
    assert (sums.zero_collapsed_rows, sums.lost_rows) == (2, 1)
    assert merge([sums, sums]).lost_rows == 2


def test_the_references_range_counts_values_that_the_candidate_could_not_hold() -> None:
    reference = np.array([7e4, 1.0, -3.4028235e38, np.nan], np.float32)
    sums = measure(reference, np.array([np.inf, 1.0, -np.inf, 0.0], np.float32), None)
    assert sums.reference_absmax == 7e4
