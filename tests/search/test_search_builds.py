"""Searching on builds: bounded, verified, honest about what is proven. A build is a function of sets here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diag.search.builds import BuildSearch, Pointed, most_builds, search_builds

Ids = frozenset[str]


@dataclass
class Engine:
    """Holds with any superset of one of `enough`, or by a table of answers; counts what it is asked."""

    enough: Sequence[Ids] = ()
    planted: Callable[[Ids], bool] | None = None
    asked: list[Ids] = field(default_factory=list)

    def truth(self, ids: Ids) -> bool:
        return self.planted(ids) if self.planted else any(wanted <= ids for wanted in self.enough)

    def __call__(self, ids: Ids) -> bool:
        self.asked.append(ids)
        return self.truth(ids)


@dataclass(frozen=True)
class Case:
    order: list[str]
    pins: list[str]
    suspects: list[str]
    engine: Engine
    listened: int = 0
    """Builds that the suspects cost."""

    def search(self, known: dict[Ids, bool] | None = None, spent: int = 0) -> BuildSearch:
        hint = Pointed(tuple(self.suspects), self.listened)
        return search_builds(self.pins, self.order, self.engine, lambda: hint, known, spent)


@st.composite
def cases(draw: st.DrawFn, monotone: bool = True) -> Case:
    order = draw(st.permutations([f"g{n}" for n in range(draw(st.integers(1, 9)))]))
    some = st.lists(st.sampled_from(order), unique=True, max_size=len(order))
    pins, suspects, listened = draw(some), draw(some), draw(st.integers(0, 1))
    if monotone:
        enough = draw(st.lists(some.map(frozenset), max_size=3))
        return Case(order, pins, suspects, Engine(enough), listened)
    answers = draw(st.lists(st.booleans(), min_size=2 ** len(order), max_size=2 ** len(order)))
    place = {name: 1 << n for n, name in enumerate(order)}
    return Case(
        order, pins, suspects, Engine(planted=lambda ids: answers[sum(place[i] for i in ids)]), listened
    )


def check(case: Case, found: BuildSearch, spent: int = 0, known: Collection[Ids] = ()) -> None:
    """What must hold whatever the engine answers."""
    asked, truth, pins = case.engine.asked, case.engine.truth, frozenset(found.pins)
    assert len(set(asked)) == len(asked)  # never the same build twice
    listened = case.listened if found.outcome != "held" and len({*case.order} - {*case.pins}) > 1 else 0
    spent += listened
    assert found.builds == len(asked) + spent
    asked = [*asked, *known]
    assert len(found.pins) == len(pins)
    assert found.limit == math.ceil(math.log2(len(case.order))) + len(pins) + 2
    if found.outcome == "impossible":
        assert found.builds <= 3 + spent
        assert frozenset(case.order) in asked
        assert not any(truth(ids) for ids in asked)
        assert (pins, found.minimal) == (frozenset(case.pins), False)
        return
    assert pins in asked
    assert truth(pins)
    assert found.builds <= found.limit
    assert (found.outcome == "held") == truth(frozenset(case.pins))
    if found.minimal:
        assert not any(truth(pins - {pin}) for pin in pins)
        assert all(pins - {pin} in asked for pin in pins)  # proven, not concluded


@given(cases())
@settings(max_examples=400, deadline=None)
def test_where_more_pins_never_hurt(case: Case) -> None:
    found = case.search()
    check(case, found)
    assert (found.outcome == "impossible") == (not case.engine.truth(frozenset(case.order)))


@given(cases(monotone=False))
@settings(max_examples=400, deadline=None)
def test_where_answers_are_not_monotone(case: Case) -> None:
    check(case, case.search())


@given(cases())
@settings(max_examples=200, deadline=None)
def test_after_another_search_that_was_impossible(case: Case) -> None:
    """Pins in another format: what was spent counts, and without pins it is the same build."""
    assume(not case.engine.truth(frozenset()))
    before = replace(case, engine=Engine()).search()
    known = {ids: False for ids in before.tried if not ids}
    again = replace(case, suspects=[], listened=0)
    check(again, again.search(known, before.builds - len(known)), before.builds, known)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_killed_search_goes_on_without_building_again(case: Case) -> None:
    whole = case.search()
    asked = list(case.engine.asked)
    for done in range(len(asked)):
        case.engine.asked.clear()
        known = {ids: case.engine.truth(ids) for ids in asked[:done]}
        again = case.search(known)
        assert (again.pins, again.builds, again.minimal) == (whole.pins, whole.builds, whole.minimal)
        assert case.engine.asked == asked[done:]


def ids(*numbers: int) -> Ids:
    return frozenset(f"g{n}" for n in numbers)


def names(*numbers: int) -> list[str]:
    return [f"g{n}" for n in numbers]


ORDER = names(*range(36))


def test_the_first_set_holds() -> None:
    found = search_builds(names(3, 1), ORDER, Engine([ids(1)]))
    assert (found.outcome, found.pins, found.builds, found.minimal) == ("held", ("g3", "g1"), 1, False)


def test_no_pin_is_needed_on_the_engine_either() -> None:
    found = search_builds([], ORDER, Engine([ids()]))
    assert (found.outcome, found.pins, found.builds, found.minimal) == ("held", (), 1, True)


def test_nothing_holds() -> None:
    engine = Engine()
    found = search_builds(names(0), ORDER, engine)
    assert (found.outcome, found.builds) == ("impossible", 2)
    assert engine.asked == [ids(0), frozenset(ORDER)]


def test_one_more_culprit_is_found_and_proven() -> None:
    """Three of the emulation, and one that only the engine needs, eleventh in the order."""
    engine = Engine([ids(0, 1, 2, 13)])
    found = search_builds(names(0, 1, 2), ORDER, engine)
    assert set(found.pins) == ids(0, 1, 2, 13)
    assert found.builds <= most_builds(36, 4) == 6 + 4 + 2


def test_what_the_engine_points_at_is_tried_before_everything() -> None:
    """As measured on MiniLM's INT8 over FP16: six merged projections, and two layers of the FFN."""
    merged = names(*range(10, 16))
    engine = Engine([ids(0, 1, *range(10, 16))])
    found = search_builds(names(0, 1), ORDER, engine, lambda: Pointed(tuple(merged)))
    assert engine.asked[1] == ids(0, 1, *range(10, 16))
    assert frozenset(ORDER) not in engine.asked
    assert set(found.pins) == ids(0, 1, *range(10, 16))
    assert found.minimal
    assert found.builds <= 1 + 1 + 3 + 8  # twice, by bisection, each pin left out


def test_a_wrong_suspect_is_left_out_again() -> None:
    found = search_builds(names(0), ORDER, Engine([ids(0, 1)]), lambda: Pointed(("g30", "g31", "g99")))
    assert set(found.pins) == ids(0, 1)


def test_a_pin_that_the_engine_does_not_need_goes() -> None:
    found = search_builds(names(0), names(*range(8)), Engine([ids(1)]))
    assert (found.pins, found.minimal) == (("g1",), True)
