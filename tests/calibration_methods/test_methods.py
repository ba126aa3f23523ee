"""Each method against its definition, on ordinary and adversarial distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from definitions import clipped, entropy_divergences, int8_error_energy, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import SHAPES

from diag.numerics import calibrate
from diag.numerics.formats import FORMATS, dequantize, quantize, symmetric_scale
from diag.numerics.histogram import Histogram, count

RARE = {"tiny": 1e-44}
"""Absolute tolerance where float32 itself has few bits left."""


def measured(values: np.ndarray) -> tuple[Histogram, float]:
    absmax = float(np.abs(values).max())
    return count(values, absmax)[0], absmax


@pytest.mark.parametrize("name", SHAPES)
def test_divergences_by_definition(name):
    found, _ = measured(SHAPES[name])
    expected = np.array(entropy_divergences(found.counts))
    np.testing.assert_allclose(calibrate.divergences(found), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_entropy_takes_the_last_least_divergence(name):
    found, absmax = measured(SHAPES[name])
    expected = np.array(entropy_divergences(found.counts))
    limit = calibrate.entropy(found, absmax)
    kept = math.floor(limit / found.width) if limit < absmax else found.top
    assert expected[kept - 128] <= expected.min() + 1e-12
    assert not np.any(expected[kept - 127 :] < expected.min() - 1e-12)
    assert limit == min((kept + 0.5) * found.width, absmax)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.001, 0.1, 1.0, 10.0]))
def test_divergences_of_sparse_random_histograms(seed, mean):
    random = np.random.default_rng(seed)
    counts = random.poisson(mean * random.exponential(size=2049))
    counts[random.integers(1025, 2049)] += 1
    found = Histogram(-3, counts.astype(np.int64))
    expected = np.array(entropy_divergences(found.counts))
    np.testing.assert_allclose(calibrate.divergences(found), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("method", calibrate.PERCENTILES)
def test_percentile_by_definition(name, method):
    values = SHAPES[name]
    found, absmax = measured(values)
    numerator, denominator = calibrate.PERCENTILES[method]
    limit = calibrate.percentile(found, absmax, numerator, denominator)
    magnitudes = np.abs(values.astype(np.float64))
    assert np.count_nonzero(magnitudes <= limit) * denominator >= values.size * numerator
    below = limit - found.width if limit < absmax else (found.top - 1) * found.width
    if below > 0:
        assert np.count_nonzero(magnitudes <= below) * denominator < values.size * numerator


@pytest.mark.parametrize("name", SHAPES)
def test_mse_is_the_least_of_a_dense_search(name):
    values = SHAPES[name]
    found, absmax = measured(values)
    limit = calibrate.mse(found, absmax)
    lies = spread(found.counts, found.width, absmax, per_bin=5)
    candidates = absmax * np.geomspace(2**-11, 1, 200)
    least = min(int8_error_energy(lies, candidate) for candidate in candidates)
    assert int8_error_energy(lies, limit) <= 1.03 * least + RARE.get(name, 0.0) ** 2


@pytest.mark.parametrize("name", [n for n in SHAPES if n not in ("all_equal", "power_of_two", "single")])
def test_mse_does_no_worse_on_the_values_themselves(name):
    """Against a search over the values, not the histogram; constants lie on the end of their range."""
    values = SHAPES[name]
    found, absmax = measured(values)
    limit = calibrate.mse(found, absmax)
    candidates = absmax * np.geomspace(2**-6, 1, 200)
    least = min(int8_error_energy(values, candidate) for candidate in candidates)
    allowed = 1.05 if name not in ("few_values", "two_clusters", "tiny") else 2.0
    assert int8_error_energy(values, limit) <= max(allowed * least, values.size * found.width**2 / 12)


@pytest.mark.parametrize("name", SHAPES)
def test_error_energy_is_that_of_values_that_lie_evenly(name):
    found, absmax = measured(SHAPES[name])
    lies = spread(found.counts, found.width, absmax, per_bin=40 if found.elements > 2_000 else 400)
    scale = len(lies) / found.elements
    for share in (0.03, 0.2, 0.77, 1.0):
        expected = int8_error_energy(lies, share * absmax) / scale / found.width**2
        (energy,) = calibrate.error_energy(found, absmax, np.array([share * absmax / found.width]))
        assert energy == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("name", ["normal", "heavy_tail", "one_sided", "softmax", "one_outlier", "uniform"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 1.0])
def test_clipping_of_the_values_themselves(name, share):
    values = SHAPES[name]
    found, absmax = measured(values)
    energy = float((values.astype(np.float64) ** 2).sum())
    limit = share * absmax
    cost = calibrate.clipping(found, absmax, energy, limit)
    expected_share, expected_energy = clipped(values, limit)
    in_the_same_bin = np.histogram(np.abs(values), [limit - found.width, limit + found.width])[0][0]
    assert cost.clipped_share == pytest.approx(expected_share, abs=(in_the_same_bin + 1) / values.size)
    assert cost.clipped_energy_ratio == pytest.approx(expected_energy, rel=0.02, abs=1e-6)
    noise = int8_error_energy(values, limit) / energy
    assert cost.noise_ratio == pytest.approx(noise, rel=0.1)


@pytest.mark.parametrize("name", SHAPES)
def test_ranges_lie_between_zero_and_the_largest_magnitude(name):
    found, absmax = measured(SHAPES[name])
    limits = calibrate.ranges(found, absmax)
    assert tuple(limits) == calibrate.METHODS
    assert limits["minmax"] == absmax
    assert all(0 < limit <= absmax for limit in limits.values())


def test_the_range_of_the_largest_magnitude_clips_nothing():
    for values in SHAPES.values():
        found, absmax = measured(values)
        energy = float((values.astype(np.float64) ** 2).sum())
        cost = calibrate.clipping(found, absmax, energy, absmax)
        assert (cost.clipped_share, cost.clipped_energy_ratio) == (0, 0)


def test_nothing_and_zeros_have_no_range():
    zeros = count(np.zeros(9, np.float32), 0.0)[0]
    for found in (Histogram(), zeros):
        assert set(calibrate.ranges(found, 0.0).values()) == {0.0}
        assert calibrate.clipping(found, 0.0, 0.0, 0.0) == calibrate.Clipping(0, 0, 0)


def test_a_lonely_outlier_makes_the_histogram_coarse():
    values = SHAPES["normal"].copy()
    assert not calibrate.is_coarse(measured(values)[0])
    values[0] = 2_000
    assert calibrate.is_coarse(measured(values)[0])


@pytest.mark.parametrize("name", ["normal", "heavy_tail", "one_sided", "huge"])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_int8_error_is_that_of_the_quantizer(name, share):
    values = SHAPES[name]
    limit = share * float(np.abs(values).max())
    scale = symmetric_scale(np.array(limit), FORMATS["int8"])
    expected = dequantize(quantize(values, scale, FORMATS["int8"]), scale) - values
    np.testing.assert_array_equal(calibrate.int8_error(values, limit), expected)
