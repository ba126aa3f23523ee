"""Rankings and targets against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diag.gate.threshold import parse_threshold
from diag.progress import Silent
from diag.search.rank import Candidate, rank
from diag.search.target import Target

CANDIDATES = [Candidate(name, frozenset({name})) for name in "abcd"]
PARTS = {"a": 0.1, "b": 4.0, "c": 1.0, "d": 2.0}


def target(*texts: str) -> Target:
    return Target([parse_threshold(text) for text in texts])


def test_effects_are_the_parts_of_an_additive_damage() -> None:
    ranking = rank(CANDIDATES, lambda low, _: sum(PARTS[n] for n in low), range(3), Silent())
    assert [e.candidate.id for e in ranking.effects] == ["b", "d", "c", "a"]
    for effect in ranking.effects:
        assert effect.lowered_mean == pytest.approx(PARTS[effect.candidate.id])
        assert effect.raised_mean == pytest.approx(PARTS[effect.candidate.id])
    assert ranking.total == pytest.approx(7.1)
    assert ranking.kendall_tau == pytest.approx(1.0)


def test_work_stops_when_the_order_is_settled() -> None:
    seen: set[int] = set()

    def damage(low: frozenset[str], batch: int) -> float:
        seen.add(batch)
        return sum(PARTS[n] for n in low)

    ranking = rank(CANDIDATES, damage, range(50), Silent())
    assert ranking.settled
    assert seen == {0, 1}


def test_an_order_that_keeps_changing_is_not_called_settled() -> None:
    generator = np.random.default_rng(0)
    noise = {batch: dict(zip("abcd", generator.random(4), strict=True)) for batch in range(3)}
    ranking = rank(CANDIDATES, lambda low, b: sum(noise[b][n] ** 3 for n in low), range(3), Silent())
    assert ranking.batches == 3
    assert all(len(effect.lowered) == 3 for effect in ranking.effects)


def test_a_spent_budget_keeps_what_was_measured_and_puts_the_rest_last() -> None:
    prior = {"d": 3.0, "b": 2.0, "c": 1.0}
    ranking = rank(
        CANDIDATES,
        lambda low, _: sum(PARTS[n] for n in low),
        range(9),
        Silent(),
        budget_s=0.0,
        prior=prior,
    )
    assert ranking.batches == 1
    assert [(e.candidate.id, e.lowered) for e in ranking.effects] == [
        ("d", [2.0]),
        ("b", []),
        ("c", []),
        ("a", []),
    ]
    assert ranking.unmeasured == 3
    assert not ranking.settled


MANY = [Candidate(f"n{i:02}", frozenset({f"n{i:02}"})) for i in range(40)]
LARGE = {"n07": 1.0, "n20": 0.8, "n33": 0.5}


def noisy(low: frozenset[str], batch: int) -> float:
    """Three large causes and many small ones; every batch weighs each of them a little differently."""
    generator = np.random.default_rng(batch)
    weights = dict(zip([c.id for c in MANY], generator.uniform(0.9, 1.1, len(MANY)), strict=True))
    return sum(LARGE.get(n, 0.005) * weights[n] for n in low)


def test_what_does_not_matter_is_measured_on_one_batch_only() -> None:
    calls = []

    def damage(low: frozenset[str], batch: int) -> float:
        calls.append(batch)
        return noisy(low, batch)

    ranking = rank(MANY, damage, range(8), Silent())
    assert ranking.settled
    assert [e.candidate.id for e in ranking.effects[:3]] == ["n07", "n20", "n33"]
    assert all(len(e.lowered) == ranking.batches == 2 for e in ranking.effects[:3])
    assert sum(len(e.lowered) == 1 for e in ranking.effects) > 25
    assert len(calls) < 1.3 * (2 * len(MANY) + 2)


def test_noise_in_small_gains_does_not_move_a_layer_up() -> None:
    """Gains are differences of large damages: here each is off by up to a tenth of the whole."""
    everything = frozenset(c.id for c in MANY)

    def damage(low: frozenset[str], batch: int) -> float:
        chance = np.random.default_rng(abs(hash((tuple(sorted(low)), batch))) % 2**32).uniform(-0.05, 0.05)
        return noisy(low, batch) + (chance if len(low) == len(everything) - 1 else 0.0)

    ranking = rank(MANY, damage, range(8), Silent())
    assert [e.candidate.id for e in ranking.effects[:3]] == ["n07", "n20", "n33"]


def test_a_pair_that_hurts_only_together_ranks_first_by_its_gain() -> None:
    def damage(low: frozenset[str], batch: int) -> float:
        return noisy(low, batch) / 100 + (5.0 if {"n03", "n30"} <= low else 0.0)

    ranking = rank(MANY, damage, range(8), Silent())
    assert {e.candidate.id for e in ranking.effects[:2]} == {"n03", "n30"}


def test_infinite_damage_ranks_first() -> None:
    ranking = rank(
        CANDIDATES, lambda low, _: math.inf if "c" in low else sum(PARTS[n] for n in low), range(1), Silent()
    )
    assert ranking.effects[0].candidate.id == "c"


@pytest.mark.parametrize(
    ("text", "metrics", "met", "damage"),
    [
        ("sqnr_db>=30", {"sqnr_db": 30.0}, True, 1.0),
        ("sqnr_db>=30", {"sqnr_db": 20.0}, False, 10.0),
        ("cosine>=0.99", {"cosine": 0.98}, False, 2.0),
        ("kl<=0.3", {"kl": 0.15}, True, 0.5),
        ("top1>=0.99", {"top1": 0.97}, False, 3.0),
        ("top1>=0.99", {"top1": 0.97, "kl": 0.02}, False, 0.02),
        ("rel_l2<=0.1", {"rel_l2": 0.2}, False, 4.0),
        ("sqnr_db>=30", {"sqnr_db": 40.0, "nonfinite": 3.0}, False, math.inf),
        ("kl<=0.3", {"sqnr_db": 40.0}, False, math.inf),
        ("sqnr_db>=30", {"sqnr_db": math.nan}, False, math.nan),
    ],
)
def test_targets(text: str, metrics: dict[str, float], met: bool, damage: float) -> None:
    goal = target(text)
    assert goal.met({"y": metrics}) is met
    assert goal.damage({"y": metrics}) == pytest.approx(damage, nan_ok=True)


def test_every_output_must_meet_the_target_and_the_worst_counts() -> None:
    outputs = {"y": {"sqnr_db": 35.0}, "z": {"sqnr_db": 25.0}}
    assert not target("sqnr_db>=30").met(outputs)
    assert target("y:sqnr_db>=30").met(outputs)
    assert target("sqnr_db>=30").damage(outputs) == pytest.approx(10**0.5)
