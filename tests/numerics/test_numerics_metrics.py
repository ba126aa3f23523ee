"""Metrics against their published definitions, and what they say of zeros, of nothing and of NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine as cosine_distance

from diag.numerics.distributions import DecisionSums
from diag.numerics.error import ErrorSums, channel_axis, measure
from diag.numerics.metrics import (
    channel_sqnr_db,
    decibel,
    decision_metrics,
    error_metrics,
    identical_metrics,
    sqnr_db,
)
from diag.numerics.table import METRICS


def metrics(reference: object, candidate: object, axis: int | None = None) -> dict[str, float]:
    return error_metrics(measure(np.array(reference, np.float32), np.array(candidate, np.float32), axis))


@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 3), st.sampled_from([(7,), (9, 5), (2, 3, 4, 5)]))
def test_metrics_are_their_definitions(seed: int, noise: float, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal(shape).astype(np.float32)
    candidate = (reference + noise * rng.standard_normal(shape)).astype(np.float32)
    found = error_metrics(measure(reference, candidate, channel_axis(len(shape), False)))
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    e = c - r
    assert found["sqnr_db"] == pytest.approx(20 * np.log10(np.linalg.norm(r) / np.linalg.norm(e)), abs=1e-3)
    assert found["rel_l2"] == pytest.approx(np.linalg.norm(e) / np.linalg.norm(r), rel=1e-4)
    assert found["cosine"] == pytest.approx(1 - cosine_distance(r.ravel(), c.ravel()), abs=1e-5)
    assert found["max_abs"] == pytest.approx(np.abs(e).max(), rel=1e-6)
    assert found["mean_error"] == pytest.approx(e.mean(), abs=1e-5 * np.abs(e).mean())
    assert found["reference_rms"] == pytest.approx(math.sqrt((r**2).mean()), rel=1e-5)
    assert found["reference_absmax"] == np.abs(r).max()
    assert found["elements"] == r.size


@pytest.mark.parametrize("error", [1e-3, 1e-4, 1e-5])
def test_cosine_near_one_keeps_its_digits(error: float) -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((300, 200)).astype(np.float32)
    candidate = (reference + error * rng.standard_normal((300, 200))).astype(np.float32)
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    expected = 1 - (r * c).sum() / math.sqrt((r**2).sum() * (c**2).sum())
    found = error_metrics(measure(reference, candidate, 1))["cosine"]
    assert 1 - found == pytest.approx(expected, rel=1e-2, abs=0)


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 0.5, 2.0, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
def test_cosine_is_blind_to_a_common_factor(factor: float, sign: int) -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((300, 200)).astype(np.float32)
    found = error_metrics(measure(reference, reference * np.float32(sign * factor), 1))
    assert found["cosine"] == pytest.approx(sign, abs=1e-3)


def test_cosine_of_a_vanished_candidate_is_zero() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((300, 200)).astype(np.float32)
    found = error_metrics(measure(reference, np.zeros_like(reference), 1))
    assert found["cosine"] == pytest.approx(0, abs=1e-6)
    assert found["sqnr_db"] == pytest.approx(0, abs=1e-9)
    assert found["rel_l2"] == pytest.approx(1)
    assert found["zero_collapsed_rows"] == 300


def test_equal_tensors() -> None:
    found = metrics([1.0, -2.0], [1.0, -2.0])
    assert found["sqnr_db"] == math.inf
    assert found["channel_min_sqnr_db"] == math.inf
    assert {name: found[name] for name in identical_metrics()} == identical_metrics()


def test_zeros_on_both_sides() -> None:
    found = metrics([0.0, 0.0], [0.0, -0.0])
    assert (found["sqnr_db"], found["cosine"], found["rel_l2"]) == (math.inf, 1.0, 0.0)


def test_an_error_without_a_signal() -> None:
    found = metrics([0.0, 0.0], [0.0, 3.0])
    assert (found["sqnr_db"], found["cosine"], found["rel_l2"]) == (-math.inf, 0.0, math.inf)
    assert found["max_abs"] == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_no_threshold(value: float) -> None:
    found = metrics([1.0, 2.0, 4.0], [1.0, value, 4.5])
    assert found["sqnr_db"] == -math.inf
    assert found["channel_min_sqnr_db"] == -math.inf
    assert (found["rel_l2"], found["max_abs"]) == (math.inf, math.inf)
    assert math.isnan(found["cosine"])
    assert found["nonfinite"] == 1
    assert found["mean_error"] == pytest.approx(0.25)  # of the two that could be compared
    assert found["reference_rms"] == pytest.approx(math.sqrt((1 + 16) / 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -3.4028235e38])
def test_a_reference_that_is_no_value_leaves_the_rest(value: float) -> None:
    found = metrics([value, 3.0, 4.0], [0.0 if math.isnan(value) else value, 3.0, 5.0])
    assert found["nonfinite"] == 0
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(25), rel=1e-6)
    assert found["mean_error"] == pytest.approx(0.5)
    assert found["reference_rms"] == pytest.approx(math.sqrt(12.5))


def test_a_dead_channel_shows_although_the_whole_looks_well() -> None:
    reference = np.ones((100, 64), np.float32)
    candidate = reference.copy()
    candidate[:, 7] = 0
    sums = measure(reference, candidate, 1)
    assert sqnr_db(sums) == pytest.approx(10 * math.log10(64), abs=1e-4)
    per_channel = channel_sqnr_db(sums)
    assert int(per_channel.argmin()) == 7
    assert per_channel[7] == pytest.approx(0, abs=1e-6)
    assert np.isinf(np.delete(per_channel, 7)).all()


def test_channels_without_energy_in_the_reference_have_no_sqnr_of_their_own() -> None:
    reference = np.array([[1.0, 0.0, 1e-7]], np.float32)
    per_channel = channel_sqnr_db(measure(reference, reference + np.float32(0.1), 1))
    assert per_channel[0] == pytest.approx(20, abs=1e-4)
    assert np.isinf(per_channel[1:]).all()


def test_nothing_compared_is_no_error() -> None:
    found = error_metrics(ErrorSums())
    assert (found["sqnr_db"], found["cosine"], found["max_abs"], found["elements"]) == (math.inf, 1.0, 0.0, 0)


def test_decibels() -> None:
    assert decibel(100, 1) == pytest.approx(20)
    assert (decibel(1, 0), decibel(0, 1), decibel(0, 0)) == (math.inf, -math.inf, math.inf)


def test_the_mean_of_nothing_is_zero_decisions() -> None:
    assert decision_metrics(DecisionSums(), True) == {"kl": 0.0, "top1": 0.0, "flips": 0.0}
    some = DecisionSums(kl_sum=3.0, rows=4, same_top1=3, flips=1)
    assert decision_metrics(some, False) == {"kl": 0.75}
    assert decision_metrics(some, True) == {"kl": 0.75, "top1": 0.75, "flips": 1.0}


def test_every_metric_stands_in_the_table() -> None:
    names = {*metrics([1.0], [1.0]), *identical_metrics(), *decision_metrics(DecisionSums(), True)}
    assert names <= set(METRICS)
    assert set(METRICS) - names == {"worst_batch_sqnr_db"}  # a comparison of batches adds it
    better = {name: METRICS[name].better for name in ("sqnr_db", "rel_l2", "mean_error", "elements")}
    assert better == {"sqnr_db": "higher", "rel_l2": "lower", "mean_error": "zero", "elements": "none"}


@pytest.mark.parametrize("crest", [4.5, 14.0, 44.0])
def test_int8_noise_follows_the_crest_factor(crest: float) -> None:
    """52.9 - 20 log10(crest) dB for absmax / rms, the published rule for a uniform quantizer of 127 steps."""
    rng = np.random.default_rng(int(crest))
    values = np.clip(rng.standard_normal(200_000), -4, 4).astype(np.float32)
    values[0] = crest * math.sqrt(float((values**2).mean()))
    step = np.float32(values.max() / 127)
    sums = measure(values, np.rint(values / step).astype(np.float32) * step, None)
    assert sqnr_db(sums) == pytest.approx(52.9 - 20 * math.log10(crest), abs=0.5)
