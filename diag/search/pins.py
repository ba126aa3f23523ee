"""The smallest set of candidates to raise: additive model first, then measured, then minimal by deletion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from diag.search.programme import cheapest_set
from diag.search.rank import Candidate, Effect, Ranking, scores

Meets = Callable[[frozenset[str]], bool]
"""Whether the target holds with the candidates of these ids raised and all others lowered."""

_LEADING = 4
"""Candidates whose roles are looked at."""

Ahead = Callable[[Sequence[frozenset[str]]], None]
"""Told which sets `Meets` will most likely be asked about next."""


@dataclass
class PinSearch:
    """What a search found. `pins` are candidate ids, most effective first."""

    outcome: str
    """`found`, `not-needed` (holds without pins), `impossible` (misses with every candidate raised) or
    `ceiling` (misses with all that the ceiling allows)."""
    pins: list[str]
    minimal: bool
    """Proven: taking any single pin away misses the target."""
    tried: dict[frozenset[str], bool] = field(default_factory=dict)
    used_held_out: bool = False
    """Whether the batches held out had to help to choose."""
    idle: frozenset[str] = frozenset()
    """Those of the pins that the target does not need: lowered they cost accuracy and buy no time."""


def find_pins(
    ranking: Ranking,
    meets: Meets,
    prices: Mapping[str, float] | None = None,
    pairs: Sequence[frozenset[str]] = (),
    time_left: Callable[[], bool] = lambda: True,
    ahead: Ahead = lambda sets: None,
    known: Sequence[frozenset[str]] = (),
) -> PinSearch:
    """Smallest set of pins that `meets` accepts.

    Both ends are measured first. Then the sets that an additive model of the damages proposes (the cheapest
    by `prices`) and the shortest prefixes of the rankings, `pairs` first where causes mask each other; then
    pins are tried without, many at once and then each, worst first, until none can be left out. Each set is
    measured once. `known` are other sets worth a look, where they are smaller. When no time is left, the set
    found so far is given, not proven minimal.
    """
    tried: dict[frozenset[str], bool] = {}

    def measured(ids: frozenset[str]) -> bool:
        if ids not in tried:
            tried[ids] = meets(ids)
        return tried[ids]

    order = [effect.candidate.id for effect in ranking.effects]
    if measured(frozenset()):
        return PinSearch("not-needed", [], True, tried)
    if not measured(frozenset(order)):
        return PinSearch("impossible", order, False, tried)
    start = _first_set(ranking, measured, prices, pairs, time_left, known)
    pins = thinned(start, order, measured, time_left, ahead)
    return PinSearch("found", [i for i in order if i in pins], time_left(), tried)


def _first_set(
    ranking: Ranking,
    measured: Meets,
    prices: Mapping[str, float] | None,
    pairs: Sequence[frozenset[str]],
    time_left: Callable[[], bool],
    known: Sequence[frozenset[str]],
) -> frozenset[str]:
    """The cheapest set that meets the target among those that the orders and the additive model propose.

    By damage alone, by both and by gain alone: where causes mask each other the orders differ, and none is
    always right. Damage alone comes first, since it varies least with what else is lowered. An order is
    followed only as far as the best set so far is long.
    """
    best = frozenset(effect.candidate.id for effect in ranking.effects)
    for order in _orders(ranking.effects, pairs):
        guess = _guess(order, ranking)
        length = shortest_prefix(order[: len(best) - 1], measured, guess)
        if length is not None and length < len(best):
            best = frozenset(order[:length])
        if not time_left():
            return best
    shorter = (ids for ids in sorted(known, key=len) if len(ids) < len(best))
    best = next(filter(measured, shorter), best)
    proposed = additive_choice(ranking.effects, ranking.total, prices)
    if proposed and _cost(proposed, prices) < _cost(best, prices) and measured(proposed):
        best = proposed
    return best


def _cost(ids: frozenset[str], prices: Mapping[str, float] | None) -> float:
    return sum((prices or {}).get(i, 1.0) for i in ids)


def _orders(effects: Sequence[Effect], pairs: Sequence[frozenset[str]]) -> list[list[str]]:
    """Candidate ids, most damaging first, by three measures; and with each pair's members first."""
    by = (
        sorted(effects, key=lambda e: -e.lowered_mean),
        list(effects),
        sorted(effects, key=lambda e: -e.raised_mean),
    )
    orders = [[e.candidate.id for e in one] for one in by]
    return orders + [
        [*(i for i in orders[0] if i in p), *(i for i in orders[0] if i not in p)] for p in pairs
    ]


def _guess(order: Sequence[str], ranking: Ranking) -> int:
    """How many of the order an additive model must raise: where a search begins, at either end."""
    damages = {e.candidate.id: max(e.lowered_mean, 0.0) for e in ranking.effects}
    total = math.fsum(damages.values())
    if not (math.isfinite(total) and math.isfinite(ranking.total)) or min(total, ranking.total) <= 0:
        return 1
    left = ranking.total
    for count, name in enumerate(order, start=1):
        left -= damages[name] * ranking.total / total
        if left <= 1.0:
            return count
    return len(order)


def shortest_prefix(order: Sequence[str], measured: Meets, guess: int = 1) -> int | None:
    """A prefix length that meets the target while one shorter misses it.

    From `guess` on in steps of 1, 2, 4, ... to the side where the answer changes, then by bisection. None
    when the whole order misses the target.
    """
    if not order:
        return None
    low, high = _bracket(len(order), measured=lambda n: measured(frozenset(order[:n])), guess=guess)
    if high > len(order):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if measured(frozenset(order[:middle])):
            high = middle
        else:
            low = middle
    return high


def _bracket(most: int, measured: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """A length that misses the target (or 0) and a longer one that meets it (or `most` + 1)."""
    at, step = min(max(guess, 1), most), 1
    if measured(at):
        high = at
        while (low := max(high - step, 0)) > 0 and measured(low):
            high, step = low, 2 * step
        return low, high
    low = at
    while low < most and not measured(high := min(low + step, most)):
        low, step = high, 2 * step
    return (low, high) if low < most else (most, most + 1)


def thinned(
    pins: frozenset[str],
    order: Sequence[str],
    measured: Meets,
    time_left: Callable[[], bool] = lambda: True,
    ahead: Ahead = lambda sets: None,
) -> frozenset[str]:
    """Leave out pins, the least effective first: one, then two, four, ... as long as that works.

    Ends when every single pin is needed (1-minimal: Zeller and Hildebrandt, "Simplifying and isolating
    failure-inducing input", 2002), or no time is left.
    """
    before = None
    while pins != before:
        before = pins
        ahead([pins - {pin} for pin in pins])
        left, size = [i for i in reversed(order) if i in pins], 1
        while left and time_left():
            chunk = frozenset(left[:size])
            if chunk < pins and measured(pins - chunk):
                pins, left, size = pins - chunk, left[size:], 2 * size
            elif size > 1:
                size = 1
            else:
                left = left[1:]
    return pins


def whole_roles(effects: Sequence[Effect], roles: Mapping[str, str]) -> list[frozenset[str]]:
    """For each role among the first candidates, all candidates of that role; `roles` by candidate id.

    One of many alike may look harmless alone and still be needed: a ViT's PV MatMuls, of which eleven come
    before other layers and the twelfth, by then the largest error left, far behind.
    """
    leading = dict.fromkeys(roles[e.candidate.id] for e in effects[:_LEADING] if e.candidate.id in roles)
    return [frozenset(e.candidate.id for e in effects if roles.get(e.candidate.id) == r) for r in leading]


def masked_pairs(effects: Sequence[Effect], most: int = 6) -> list[frozenset[str]]:
    """Pairs worth a trial where the two orders disagree: the worst by damage with the worst by gain.

    Two causes that mask each other look harmless when raised alone, two that hurt only together when lowered
    alone: in both cases raising the two at once shows them.
    """
    half = max(2, math.isqrt(2 * most) + 1)
    worst = sorted(effects, key=lambda e: -e.lowered_mean)[:half]
    best = sorted(effects, key=lambda e: -e.raised_mean)[:half]
    ids = dict.fromkeys([e.candidate.id for pair in zip(worst, best, strict=True) for e in pair])
    return [frozenset(pair) for pair in itertools.combinations(ids, 2)][:most]


def additive_choice(
    effects: Sequence[Effect], total: float, prices: Mapping[str, float] | None = None
) -> frozenset[str]:
    """Candidates to raise so that the damages of the others add up to at most 1, at the lowest price.

    The damages are scaled so that all of them together give the measured `total`. Empty when the model says
    nothing (damages not finite, or no solution).
    """
    damages = np.array([max(effect.lowered_mean, 0.0) for effect in effects])
    if not (np.isfinite(damages).all() and math.isfinite(total)) or damages.sum() <= 0:
        return frozenset()
    damages *= total / damages.sum()
    cost = np.array([(prices or {}).get(effect.candidate.id, 1.0) for effect in effects])
    return cheapest_set(effects, cost, damages[np.newaxis, :], least=damages.sum() - 1.0)


def unstable_pins(pins: Sequence[str], effects: Sequence[Effect]) -> list[str]:
    """Pins that one half of the batches ranks far lower: behind twice the number of pins."""
    measured = [effect for effect in effects if effect.lowered]
    if max((len(effect.lowered) for effect in measured), default=0) < 2:
        return []
    halves = [_half(measured, start) for start in (0, 1)]
    limit = 2 * max(len(pins), 1)
    return [pin for pin in pins if any(pin in half and half.index(pin) >= limit for half in halves)]


def _half(effects: Sequence[Effect], start: int) -> list[str]:
    """The order by every second batch; what was measured on one batch has that one in both halves."""
    parts = [
        Effect(e.candidate, e.lowered[start::2] or e.lowered, e.raised[start::2] or e.raised) for e in effects
    ]
    order = sorted(zip(scores(parts), parts, strict=True), key=lambda item: -item[0])
    return [part.candidate.id for _, part in order]


def candidates_of(lowered: Sequence[str], groups: Sequence[tuple[str, Sequence[str]]]) -> list[Candidate]:
    """Candidates in graph order: each lowered layer, with its group (kind, layers) if it has one."""
    position = {layer: index for index, layer in enumerate(lowered)}
    taken: set[str] = set()
    found = []
    for kind, layers in groups:
        members = [layer for layer in layers if layer in position and layer not in taken]
        if len(members) > 1:
            found.append(Candidate(min(members, key=position.__getitem__), frozenset(members), kind))
            taken.update(members)
    found += [Candidate(layer, frozenset({layer})) for layer in lowered if layer not in taken]
    return sorted(found, key=lambda candidate: position[candidate.id])
