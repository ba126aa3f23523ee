"""Bootstrap intervals against the normal approximation, which many batches must approach."""

from __future__ import annotations

import numpy as np
import pytest

from diag.search.evidence import evidence


def test_the_interval_is_the_normal_one_where_batches_are_many() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.5, 400)
    found = evidence(values.tolist())
    half = 1.96 * values.std() / np.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert found.decides


def test_a_target_inside_the_interval_is_not_decided_and_more_batches_are_asked_for() -> None:
    found = evidence([0.2, 1.0, 2.4])
    assert not found.decides
    assert found.needed > 3


def test_equal_damages_decide_and_equal_input_gives_equal_output() -> None:
    assert evidence([0.5, 0.5, 0.5]).decides
    assert evidence([0.2, 1.0, 2.4]) == evidence([0.2, 1.0, 2.4])


def test_infinite_damage_misses_for_certain() -> None:
    assert evidence([0.1, float("inf")]).decides


def test_needed_batches_shrink_the_interval_below_the_gap() -> None:
    """Half-width goes as one over the root of the count: 4 times the batches, half the interval."""
    few = [0.4, 1.8, 0.6, 0.8]
    found = evidence(few)
    many = evidence(few * (found.needed // len(few) + 1))
    assert (many.high - many.low) / 2 <= 1.1 * abs(1 - found.mean)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no damage"):
        evidence([])
