"""KL divergence against SciPy's definition, and decisions: agreement, flips, margins, noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from diag.numerics.distributions import DecisionSums, measure_classes, measure_logits, measure_probabilities


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def kl_by_definition(reference: np.ndarray, candidate: np.ndarray) -> float:
    p, q = (softmax(a.astype(np.float64), axis=-1) for a in (reference, candidate))
    return float(rel_entr(p, q).sum())


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 5), st.sampled_from([(6,), (5, 9), (2, 3, 4, 7), (200, 2)]))
def test_kl_is_scipys(seed: int, noise: float, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    reference = (3 * rng.standard_normal(shape)).astype(np.float32)
    candidate = (reference + noise * rng.standard_normal(shape)).astype(np.float32)
    rows = math.prod(shape[:-1])
    expected = kl_by_definition(reference, candidate)
    found = measure_logits(reference, candidate)
    assert found.rows == rows
    assert found.kl_sum == pytest.approx(expected, rel=1e-4, abs=1e-6 * rows)
    p, q = softmax(reference, axis=-1), softmax(candidate, axis=-1)
    probabilities = measure_probabilities(p, q)
    assert probabilities.rows == rows
    assert probabilities.kl_sum == pytest.approx(expected, rel=1e-4, abs=1e-6 * rows)
    best = reference.reshape(rows, -1).argmax(1) == candidate.reshape(rows, -1).argmax(1)
    assert found.same_top1 == best.sum()
    assert found.flips == rows - best.sum()  # without noise, and no ties


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 5), st.sampled_from([(6,), (5, 9), (2, 3, 4, 7), (200, 2)]))
def test_class_probabilities_decide(seed: int, noise: float, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    reference = 3 * rng.standard_normal(shape)
    p, q = (
        softmax(a, axis=-1).astype(np.float32)
        for a in (reference, reference + noise * rng.standard_normal(shape))
    )
    rows = math.prod(shape[:-1])
    found, top = measure_classes(p, q, 0.05), np.sort(p.reshape(rows, -1), axis=1)
    same = p.reshape(rows, -1).argmax(1) == q.reshape(rows, -1).argmax(1)
    assert found.kl_sum == measure_probabilities(p, q).kl_sum
    assert (found.rows, found.same_top1) == (rows, same.sum())
    assert found.flips == (~same & (top[:, -1] - top[:, -2] > np.float32(0.1))).sum()


def test_class_probabilities_that_are_not_numbers_agree_with_nothing() -> None:
    p = logits([0.9, 0.1], [0.9, 0.1])
    found = measure_classes(p, logits([math.nan, math.nan], [0.6, 0.4]))
    assert (found.rows, found.same_top1, found.flips) == (2, 1, 1)


def test_a_common_shift_of_logits_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((50, 300)).astype(np.float32)
    found = measure_logits(reference, reference + 64)
    assert 0 <= found.kl_sum < 1e-4
    assert (found.same_top1, found.flips) == (50, 0)


def test_kl_of_softmax_is_never_negative() -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        reference = np.random.default_rng(seed).standard_normal((8, 1000)).astype(np.float32)
        candidate = reference + np.float32(1e-6) * rng.standard_normal(reference.shape).astype(np.float32)
        assert measure_logits(reference, candidate).kl_sum >= 0


def test_terms_without_reference_are_zero_and_underflow_stays_finite() -> None:
    p, q = logits([0.0, 0.5, 0.5]), logits([0.9, 0.0, 0.1])
    expected = 0.5 * math.log(0.5 / 2.0**-149) + 0.5 * math.log(0.5 / 0.1)
    assert measure_probabilities(p, q).kl_sum == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("hidden", [-math.inf, -3.4028235e38, -1e30])
@pytest.mark.parametrize("low", [-math.inf, -65504.0])
def test_masked_tokens_have_no_part_in_kl(hidden: float, low: float) -> None:
    reference, candidate = logits([1.0, 2.0, hidden]), logits([1.5, 2.0, low])
    expected = kl_by_definition(logits([1.0, 2.0]), logits([1.5, 2.0]))
    found = measure_logits(reference, candidate)
    assert found.kl_sum == pytest.approx(expected, rel=1e-5)
    assert (found.same_top1, found.flips) == (1, 0)


def test_a_token_that_the_candidate_loses_costs_infinitely() -> None:
    assert measure_logits(logits([1.0, 2.0]), logits([1.0, -math.inf])).kl_sum == math.inf


def test_a_candidate_that_is_not_a_number_agrees_with_nothing() -> None:
    reference = logits([5.0, 1.0, 0.0], [5.0, 1.0, 0.0])
    candidate = logits([math.nan, math.nan, math.nan], [5.0, 1.0, 0.0])
    found = measure_logits(reference, candidate)
    assert math.isnan(found.kl_sum)
    assert (found.rows, found.same_top1, found.flips) == (2, 1, 1)
    assert math.isnan(measure_probabilities(logits([0.5, 0.5]), logits([math.nan, 0.5])).kl_sum)


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_rows_whose_reference_is_no_distribution_are_left_out(row: list[float]) -> None:
    found = measure_logits(logits(row, [2.0, 1.0]), logits([0.0, 0.0], [2.0, 1.0]))
    assert (found.rows, found.same_top1, found.flips, found.kl_sum) == (1, 1, 0, 0.0)


@pytest.mark.parametrize(
    ("reference", "candidate", "noise", "flips"),
    [
        ([1.0, 0.5], [0.5, 1.0], 0.0, 1),
        ([1.0, 0.5], [0.5, 1.0], 0.24, 1),
        ([1.0, 0.5], [0.5, 1.0], 0.25, 0),  # margin 0.5 is not more than twice the noise
        ([1.0, 1.0], [0.5, 1.0], 0.0, 0),  # the reference itself is a tie
        ([1.0, 0.5], [0.7, 0.6], 0.0, 0),
        ([1.0, -math.inf], [0.0, 1.0], 9.0, 1),
    ],
)
def test_a_flip_counts_only_beyond_the_noise(
    reference: list[float], candidate: list[float], noise: float, flips: int
) -> None:
    found = measure_logits(logits(reference), logits(candidate), noise)
    assert found.flips == flips


def test_one_class_never_flips() -> None:
    found = measure_logits(np.ones((3, 1), np.float32), np.zeros((3, 1), np.float32))
    assert (found.rows, found.same_top1, found.flips, found.kl_sum) == (3, 3, 0, 0.0)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_nothing_is_no_row(shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.float32)
    assert measure_logits(empty, empty) == DecisionSums()
    assert measure_probabilities(empty, empty) == DecisionSums()


def test_rows_beyond_one_block_are_all_seen() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((1000, 700)).astype(np.float32)
    candidate = reference + rng.standard_normal((1000, 700)).astype(np.float32) / 4
    whole = measure_logits(reference, candidate)
    parts = DecisionSums()
    for piece in np.array_split(np.arange(1000), 7):
        parts.add(measure_logits(reference[piece], candidate[piece]))
    assert (parts.rows, parts.same_top1, parts.flips) == (1000, whole.same_top1, whole.flips)
    assert parts.kl_sum == pytest.approx(whole.kl_sum, rel=1e-5)
    assert whole.kl_sum == pytest.approx(kl_by_definition(reference, candidate), rel=1e-4)
