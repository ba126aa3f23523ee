"""Pin sets on models whose damage is written down, so that the right answer is known by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest

from diag.progress import Silent
from diag.search.pins import (
    PinSearch,
    additive_choice,
    candidates_of,
    find_pins,
    shortest_prefix,
    thinned,
    unstable_pins,
    whole_roles,
)
from diag.search.rank import Candidate, Effect, Ranking, rank

NAMES = [f"layer{i}" for i in range(9)]
Model = Callable[[frozenset[str]], float]
"""Damage by the set of lowered layers; the target is a damage of at most 1."""


def additive(parts: dict[str, float]) -> Model:
    return lambda low: sum(parts.get(name, 0.01) for name in low)


def masking(low: frozenset[str]) -> float:
    """Two culprits of which one is enough for the whole damage."""
    return 5.0 if low & {"layer2", "layer5"} else 0.01 * len(low)


def together(low: frozenset[str]) -> float:
    """Two layers that hurt only together."""
    return 5.0 if {"layer3", "layer7"} <= low else 0.01 * len(low)


PLANTED: dict[str, Model] = {
    "one": additive({"layer4": 3.0}),
    "two": additive({"layer1": 3.0, "layer6": 2.0}),
    "many-small": additive(dict.fromkeys(NAMES, 0.3)),
    "steps": additive({name: 0.2 * i for i, name in enumerate(NAMES)}),
    "masking": masking,
    "together": together,
}


def search(model: Model) -> tuple[PinSearch, Ranking]:
    candidates = [Candidate(name, frozenset({name})) for name in NAMES]
    ranking = rank(candidates, lambda low, _: model(low), range(2), Silent())
    everything = frozenset(NAMES)
    return find_pins(ranking, lambda ids: model(everything - ids) <= 1.0), ranking


def smallest(model: Model) -> int:
    everything = frozenset(NAMES)
    return next(
        size
        for size in range(len(NAMES) + 1)
        if any(model(everything - frozenset(pins)) <= 1.0 for pins in combinations(NAMES, size))
    )


@pytest.mark.parametrize("name", PLANTED)
def test_the_set_is_as_small_as_brute_force_finds_it(name: str) -> None:
    found, _ = search(PLANTED[name])
    assert found.outcome == "found"
    assert len(found.pins) == smallest(PLANTED[name])


@pytest.mark.parametrize("name", PLANTED)
def test_the_set_meets_the_target_and_no_pin_can_go(name: str) -> None:
    model, everything = PLANTED[name], frozenset(NAMES)
    found, _ = search(model)
    pins = frozenset(found.pins)
    assert model(everything - pins) <= 1.0
    assert found.minimal
    assert all(model(everything - (pins - {pin})) > 1.0 for pin in pins)


@pytest.mark.parametrize("needed", [1, 2, 30, 63, 64])
@pytest.mark.parametrize("guess", [1, 2, 30, 63, 64, 1000])
def test_a_prefix_is_found_from_wherever_the_search_begins(needed: int, guess: int) -> None:
    order = [f"n{i:02}" for i in range(64)]
    asked: list[int] = []

    def measured(ids: frozenset[str]) -> bool:
        asked.append(len(ids))
        return len(ids) >= needed

    assert shortest_prefix(order, measured, guess) == needed
    away = abs(min(guess, 64) - needed)
    # Doubling steps to the answer's other side, then bisection of the last step.
    assert len(asked) <= 2 * math.log2(away + 1) + 3
    assert all(abs(n - needed) <= 2 * away + 1 for n in asked)


def test_no_prefix_where_the_whole_order_misses() -> None:
    assert shortest_prefix(["a", "b", "c"], lambda ids: False) is None
    assert shortest_prefix([], lambda ids: True) is None


@pytest.mark.parametrize("needed", [3, 61])
def test_where_the_additive_model_is_right_the_proof_is_nearly_all_the_work(needed: int) -> None:
    """Of 64 equal causes, few or nearly all must be raised: the search begins at the end that is nearer."""
    asked: list[frozenset[str]] = []
    each = 1 / (64 - needed + 0.5)
    effects = [Effect(Candidate(f"n{i:02}", frozenset({f"n{i:02}"})), [each], [each]) for i in range(64)]

    def meets(ids: frozenset[str]) -> bool:
        asked.append(ids)
        return (64 - len(ids)) * each <= 1.0

    found = find_pins(Ranking(effects, 64 * each, 1, True, 1.0), meets)
    assert len(found.pins) == needed
    assert len(asked) <= needed + 5  # both ends, the set, one shorter, what the programme proposes


def test_thinning_leaves_out_many_at_once_and_stops_at_what_is_needed() -> None:
    order = [f"n{i:03}" for i in range(200)]
    needed, asked = frozenset({"n000", "n100", "n199"}), []

    def measured(ids: frozenset[str]) -> bool:
        asked.append(ids)
        return needed <= ids

    assert thinned(frozenset(order), order, measured) == needed
    assert len(asked) < 60


def test_no_pins_where_the_target_holds_already() -> None:
    found, _ = search(additive({}))
    assert (found.outcome, found.pins) == ("not-needed", [])


def test_a_miss_with_everything_raised_is_seen_in_two_trials() -> None:
    found, _ = search(lambda low: 7.0)
    assert found.outcome == "impossible"
    assert len(found.tried) == 2


def test_each_set_is_measured_once() -> None:
    asked: list[frozenset[str]] = []
    ranking = rank(
        [Candidate(n, frozenset({n})) for n in NAMES],
        lambda low, _: PLANTED["steps"](low),
        range(1),
        Silent(),
    )

    def meets(ids: frozenset[str]) -> bool:
        asked.append(ids)
        return PLANTED["steps"](frozenset(NAMES) - ids) <= 1.0

    find_pins(ranking, meets)
    assert len(asked) == len(set(asked))


def test_masked_causes_show_in_the_kendall_tau() -> None:
    _, clear = search(PLANTED["steps"])
    _, masked = search(masking)
    assert clear.kendall_tau > 0.99
    assert masked.kendall_tau < 0.9


def test_the_additive_choice_is_the_cheapest_by_price() -> None:
    effects = [
        Effect(Candidate(n, frozenset({n})), [d], [d]) for n, d in (("a", 2.0), ("b", 1.1), ("c", 1.2))
    ]
    # Raising a and c leaves 1.1, any other pair more: only all three reach 1.
    assert additive_choice(effects, 4.3) == frozenset("abc")
    assert additive_choice(effects, 3.6) == frozenset("ac")  # scaled to 1.67, 0.92, 1.00: {a, c} leaves 0.92
    # Scaled to a total of 3.5, one of b and c may stay low (0.90, 0.98): the price decides which.
    assert additive_choice(effects, 3.5, {"a": 1.0, "b": 9.0, "c": 1.0}) == frozenset("ac")
    assert additive_choice(effects, 3.5, {"a": 1.0, "b": 1.0, "c": 9.0}) == frozenset("ab")


def test_the_additive_choice_is_silent_about_infinite_damage() -> None:
    effects = [Effect(Candidate("a", frozenset("a")), [float("inf")], [0.0])]
    assert additive_choice(effects, float("inf")) == frozenset()


def test_groups_are_one_candidate_named_by_their_first_layer() -> None:
    found = candidates_of(["q", "k", "x", "v"], [("shared_input", ["v", "q", "k"]), ("norm", ["n"])])
    assert [(c.id, c.layers, c.kind) for c in found] == [
        ("q", frozenset("qkv"), "shared_input"),
        ("x", frozenset("x"), "layer"),
    ]


def test_pins_that_only_one_half_of_the_data_supports_are_unstable() -> None:
    names = [f"n{i}" for i in range(10)]
    effects = [
        Effect(Candidate(n, frozenset({n})), [1.0 - i / 10, 1.0 - i / 10], [0.0, 0.0])
        for i, n in enumerate(names)
    ]
    effects[0] = Effect(effects[0].candidate, [5.0, 0.0], [0.0, 0.0])
    assert unstable_pins(["n0"], effects) == ["n0"]
    assert unstable_pins(["n1"], effects) == []


def test_without_time_the_set_still_meets_the_target_and_is_not_called_minimal() -> None:
    model, everything = PLANTED["steps"], frozenset(NAMES)
    _, ranking = search(model)
    found = find_pins(ranking, lambda ids: model(everything - ids) <= 1.0, time_left=lambda: False)
    assert found.outcome == "found"
    assert not found.minimal
    assert model(everything - frozenset(found.pins)) <= 1.0


def test_whole_roles_are_those_of_the_first_candidates() -> None:
    effects = [Effect(Candidate(n, frozenset({n})), [1.0], [1.0]) for n in "abcdefg"]
    roles = dict(zip("abcdefg", ["pv", "ffn", "pv", "", "qk", "pv", "norm"], strict=True))
    named = {name: role for name, role in roles.items() if role}
    assert whole_roles(effects, named) == [frozenset("acf"), frozenset("b")]


def test_a_known_set_that_holds_is_taken_where_it_is_smaller() -> None:
    """Pins 2 and 6 are enough together, which no order shows: their damages are the smallest."""
    parts = {name: 1.0 + i for i, name in enumerate(NAMES)} | {"layer2": 0.1, "layer6": 0.2}
    effects = [Effect(Candidate(n, frozenset({n})), [d], [d]) for n, d in parts.items()]
    ranking = Ranking(sorted(effects, key=lambda e: -e.lowered_mean), sum(parts.values()), 1, True, 1.0)

    def meets(ids: frozenset[str]) -> bool:
        return {"layer2", "layer6"} <= ids or len(ids) >= 7

    wrong, right = frozenset({"layer0"}), frozenset({"layer2", "layer6", "layer8"})
    assert len(find_pins(ranking, meets).pins) > 2
    found = find_pins(ranking, meets, known=[right, wrong])
    assert set(found.pins) == {"layer2", "layer6"}
    assert found.minimal
