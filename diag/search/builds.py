"""Pins on real builds: a set that the engine holds, in few builds, where it misses with the emulation's.

Each question is one build and one run, so their number is bounded: log2(groups) + pins + 2, of the set found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from diag.search.pins import thinned

Holds = Callable[[frozenset[str]], bool]
"""Whether the engine holds the target with the candidates of these ids raised: one build and one run."""

_WIDER = 4
"""Growth of the steps: a set that misses narrowly wants one pin more, an engine's defect any of them."""


@dataclass(frozen=True)
class Pointed:
    """Candidates that the engine itself points at, the likeliest first."""

    ids: tuple[str, ...] = ()
    builds: int = 0
    """Built to find out."""


Outcome = Literal["held", "repaired", "impossible"]


def most_builds(groups: int, pins: int) -> int:
    """How many builds may be spent on a verified set of so many pins: ceil(log2(groups)) + pins + 2."""
    return max(groups - 1, 0).bit_length() + pins + 2


@dataclass(frozen=True)
class BuildSearch:
    """What a search on builds found."""

    outcome: Outcome
    """`held` (with the pins it began with), `repaired` (with others), `impossible` (not with all of them)."""
    pins: tuple[str, ...]
    """A set that was built and holds; where nothing held, the one it began with."""
    minimal: bool
    """Proven on builds: without any single pin the engine was built, and missed."""
    builds: int
    """Sets that were built, those of an earlier run too."""
    limit: int
    """`most_builds` of these pins."""
    tried: Mapping[frozenset[str], bool] = field(default_factory=dict)


class _Builds:
    """Answers so far, and how many more the limit allows."""

    def __init__(self, holds: Holds, groups: int, known: Mapping[frozenset[str], bool], spent: int) -> None:
        self._holds = holds
        self._groups = groups
        self.spent = spent
        self.tried = dict(known)

    def __call__(self, ids: frozenset[str]) -> bool:
        if ids not in self.tried:
            self.tried[ids] = self._holds(ids)
        return self.tried[ids]

    def within_limit(self, ids: frozenset[str]) -> bool:
        """The answer; a miss, without a build, where the limit of a set of this size is spent."""
        limit = most_builds(self._groups, len(ids))
        return (ids in self.tried or self.made < limit) and self(ids)

    @property
    def made(self) -> int:
        return self.spent + len(self.tried)

    def result(self, outcome: Outcome, pins: frozenset[str], order: Sequence[str]) -> BuildSearch:
        minimal = all(self.tried.get(pins - {pin}) is False for pin in pins)
        limit = most_builds(self._groups, len(pins))
        named = tuple(i for i in order if i in pins)
        return BuildSearch(outcome, named, minimal and self.tried[pins], self.made, limit, dict(self.tried))


def search_builds(
    pins: Sequence[str],
    order: Sequence[str],
    holds: Holds,
    suspects: Callable[[], Pointed] = Pointed,
    known: Mapping[frozenset[str], bool] | None = None,
    spent: int = 0,
) -> BuildSearch:
    """From the emulation's `pins` (most effective first) to a set with which the engine holds the target.

    `order` has all candidates, the likeliest first; `suspects` is asked after the first miss and names those
    that the engine itself points at. Built are: the pins; the pins with the suspects; everything. Then more
    and more of the order beside the pins, in steps of 1, 4, 16, ... and by bisection; the pins with the last
    one that this added; and then pins are left out until each is needed or the limit is reached
    (`most_builds`). What is claimed was built: where answers are not monotone the set in the end still holds,
    and `minimal` is still true.
    `known` are earlier answers, which count as builds; so do `spent` others.
    """
    built = _Builds(holds, len(order), known or {}, spent)
    first = frozenset(pins)
    if built(first):
        return built.result("held", first, pins)
    others = [i for i in order if i not in first]
    hint = suspects() if len(others) > 1 else Pointed()
    built.spent += hint.builds
    pointed = [i for i in dict.fromkeys(hint.ids) if i in others]
    rest = [*pointed, *(i for i in others if i not in pointed)]
    added = _shortest(first, rest, len(pointed), built)
    if added is None:
        return built.result("impossible", first, pins)
    named = [*pins, *rest]
    short = first | {rest[added - 1]}  # the last one added: without it the engine missed
    worth = added > len(pointed) and built.within_limit(short)
    found = _fewer(short if worth else first | set(rest[:added]), named, built)
    return built.result("repaired", found, named)


def _shortest(first: frozenset[str], rest: Sequence[str], pointed: int, built: _Builds) -> int | None:
    """How many of `rest` the engine needs beside the first set; None where all of them are not enough."""
    low, high = 0, len(rest)
    if 0 < pointed < len(rest):
        low, high = (0, pointed) if built(first | set(rest[:pointed])) else (pointed, high)
    if not rest or (high == len(rest) and not built(first | set(rest))):
        return None
    step = 1
    while high - low > 1:
        at = min(low + step, (low + high) // 2)
        if built.within_limit(first | set(rest[:at])):
            high = at
        else:
            low, step = at, _WIDER * step
    return high


def _fewer(found: frozenset[str], named: Sequence[str], built: _Builds) -> frozenset[str]:
    """Leave out pins, the latest first, until each is needed or the limit is reached."""
    found = thinned(found, named, built.within_limit)
    alone = len(found) == 1 and built.within_limit(frozenset())
    return frozenset() if alone else found
