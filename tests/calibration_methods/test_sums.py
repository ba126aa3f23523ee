"""Everything that is counted adds up exactly: any batches, any grouping, any order, the same bytes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diag.calibration.measurement import Measurement, measurement_of, table_of
from diag.calibration.samples import Split, split
from diag.calibration.sums import VARIES, summarize

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))
BATCHES = st.lists(hnp.arrays(np.float32, SHAPES, elements=FLOATS), min_size=1, max_size=6)


def measured(array: np.ndarray) -> Measurement:
    samples = split({"x": array})
    first = samples.first
    return Measurement(
        {"last": summarize(array, samples, -1), "second": summarize(array, samples, 1)},
        batches=1,
        half_samples=(first, samples.samples - first),
        identity=samples.key,
        keys=(samples.key,),
    )


def written(found: Measurement) -> str:
    return table_of(found, "0" * 64, "minmax", costed=False).model_dump_json()


def joined(parts: list[Measurement]) -> Measurement:
    found = Measurement.of(["last", "second"])
    for part in parts:
        found.add(part)
    return found


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.randoms(), st.data())
def test_any_grouping_in_any_order_writes_the_same(batches, random, data):
    expected = written(joined([measured(batch) for batch in batches]))
    random.shuffle(batches)
    groups: dict[int, list[Measurement]] = {}
    for batch in batches:
        groups.setdefault(data.draw(st.integers(0, 2)), []).append(measured(batch))
    through_tables = []
    for group in groups.values():
        table = table_of(joined(group), "0" * 64, "minmax", costed=False)
        through_tables.append(measurement_of(table.model_validate_json(table.model_dump_json(by_alias=True))))
    assert written(joined(through_tables)) == expected


@given(hnp.arrays(np.float32, SHAPES, elements=FLOATS))
def test_extremes_and_counts_are_exact(array):
    sums = measured(array).tensors["last"]
    assert sums.histogram.elements == array.size
    if array.size:
        assert (sums.minimum, sums.maximum) == (array.min(), array.max())
        assert sums.absmax == np.abs(array).max()
        if array.shape[-1] > 1:
            np.testing.assert_array_equal(sums.channels, np.abs(array).max(axis=(0, 1)))


def test_sums_are_those_of_float64():
    array = np.random.default_rng(0).normal(3, 2, (6, 40, 50)).astype(np.float32)
    sums = measured(array).tensors["last"]
    assert float(sums.total) == pytest.approx(array.astype(np.float64).sum(), rel=1e-6)
    assert float(sums.energy) == pytest.approx((array.astype(np.float64) ** 2).sum(), rel=1e-6)
    assert isinstance(sums.energy, Fraction)


def test_a_sample_falls_into_the_same_half_wherever_it_is():
    values = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    whole = split({"x": values})
    second = {int(i) for i in whole.order[whole.first :]}
    for i in range(8):
        alone = split({"x": values[i : i + 1]})
        assert (alone.first == 0) == (i in second)
    assert split({"x": values[::-1]}).key == whole.key


def test_tensors_are_cut_by_sample():
    halves = Split(key=0, order=np.array([2, 0, 1]), first=1).halves(np.arange(12.0).reshape(6, 2))
    np.testing.assert_array_equal(halves[0], [[8, 9], [10, 11]])
    np.testing.assert_array_equal(halves[1], [[0, 1], [2, 3], [4, 5], [6, 7]])
    whole, nothing = Split(key=4, order=np.array([0, 1]), first=1).halves(np.arange(3.0))
    assert (whole.size, nothing.size) == (3, 0)


def test_channels_whose_number_depends_on_the_data():
    first, second = (measured(np.ones((1, 2, n), np.float32)) for n in (3, 5))
    first.add(second)
    assert first.tensors["last"].channels is VARIES
    assert first.tensors["second"].channels is not VARIES
    assert table_of(first, "0" * 64, "minmax").tensors["last"].channel_absmax == "varies"


def test_only_what_is_not_finite_is_counted_of_a_bad_tensor():
    array = np.array([[1, np.nan], [np.inf, -np.inf]], np.float32)
    sums = summarize(array, split({"x": array}), -1)
    assert (sums.nonfinite, sums.histogram.elements, sums.absmax) == (3, 0, 0.0)
