"""Chooses pins on some batches so that they hold on others, under the user's ceiling."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from diag.errors import NotEnoughEvidenceError
from diag.pipeline.search.early import missed_early
from diag.pipeline.search.plans import Kind, Weighed, pinned
from diag.pipeline.search.setup import Search
from diag.progress import Progress
from diag.search.ceiling import affordable, within
from diag.search.evidence import evidence
from diag.search.frontier import best_by_size
from diag.search.pins import PinSearch, find_pins, masked_pairs, thinned, whole_roles
from diag.search.rank import Ranking

_MASKED_TAU = 0.5
"""Kendall's tau of the two orders under which pairs are tried: over a quarter of all pairs are discordant."""

_ROUNDS = 2
"""Times that pins are chosen with more slack because they missed on the batches held out."""

_MORE_SLACK = 1.05
_FEW_BATCHES = 3
"""From so many on, the spread of the batches says something."""


def judge_start(search: Search) -> None:
    """Refuse data that cannot tell whether pins are needed. Raises NotEnoughEvidenceError."""
    if search.batches < _FEW_BATCHES:
        return
    low, batches = search.low(), range(search.batches)
    search.variants.ahead((low, b) for b in batches)
    found = evidence([search.target.distance(search.variants.metrics(low, (b,))) for b in batches])
    if not found.decides:
        raise NotEnoughEvidenceError(
            f"without pins the damage is {found.mean:.2g} of what {search.target} allows, with a 95 % "
            f"interval of {found.low:.2g} to {found.high:.2g}: {found.batches} batches cannot tell "
            "whether it holds",
            f"About {found.needed} batches would.",
        )


def both_ends(search: Search) -> PinSearch | None:
    """The answer, where it is no pin at all, or not even all of them; None where a search must tell."""
    none, everything = frozenset[str](), search.ids
    if _meets_all(search, none):
        return PinSearch("not-needed", [], True, {none: True})
    if not _meets(search, everything, search.chosen):
        order = [candidate.id for candidate in search.candidates]
        return PinSearch("impossible", order, False, {none: False, everything: False})
    return None


def choose(search: Search, ranking: Ranking, progress: Progress) -> PinSearch:
    """The smallest set that meets the target on both parts of the data, within the ceiling."""
    pairs = masked_pairs(ranking.effects) if ranking.kendall_tau < _MASKED_TAU else []
    if pairs:
        progress.note(f"causes mask each other (Kendall tau {ranking.kendall_tau:.2f}): pairs are tried too")
    found = _held(search, ranking, pairs, progress)
    if found.outcome == "found" and not can_afford(search, found.pins):
        found = _under_ceiling(search, ranking, found)
    return _without_idle(search, ranking, found)


def _held(search: Search, ranking: Ranking, pairs: Sequence[frozenset[str]], progress: Progress) -> PinSearch:
    """Pins chosen on one part of the data, with as much slack as the other part asks for."""
    slack, prices, ends = 1.0, _costs(search), time.monotonic() + search.settings.budget_s / 2

    def time_left() -> bool:
        return time.monotonic() < ends

    def ahead(sets: Sequence[frozenset[str]]) -> None:
        search.variants.ahead((search.low(ids), b) for ids in sets for b in search.chosen)

    roles = {c.id: search.planned.roles[c.id].name for c in search.candidates}
    known = whole_roles(ranking.effects, {i: role for i, role in roles.items() if role != "other"})
    for _ in range(_ROUNDS):

        def meets(ids: frozenset[str], slack: float = slack) -> bool:
            return _meets(search, ids, search.chosen, slack)

        found = find_pins(ranking, meets, prices, pairs, time_left, ahead, known)
        if found.outcome == "impossible" or _meets(search, frozenset(found.pins), search.held_out):
            return found
        known += [ids for ids, holds in found.tried.items() if holds]
        progress.note(f"{len(found.pins)} pins miss on the batches held out; choosing with more slack")
        over = _damage(search, found.pins, search.held_out) / max(
            _damage(search, found.pins, search.chosen), 1e-12
        )
        slack = max(slack * _MORE_SLACK, over * _MORE_SLACK)
        if not (math.isfinite(slack) and _meets(search, search.ids, search.chosen, slack)):
            break
    progress.note("the batches held out ask for other pins: all batches choose now, and none prove")
    every = tuple(range(search.batches))

    def meets_all(ids: frozenset[str]) -> bool:
        return _meets(search, ids, every)

    found = find_pins(ranking, meets_all, prices, pairs, time_left, ahead, known)
    return replace(found, used_held_out=True)


def _meets(search: Search, ids: frozenset[str], batches: Sequence[int], slack: float = 1.0) -> bool:
    search.variants.ahead((search.low(ids), b) for b in batches)
    if missed_early(search, ids, batches, slack):
        return False
    metrics = search.variants.metrics(search.low(ids), batches)
    return search.target.met(metrics) and (slack == 1.0 or search.target.distance(metrics) <= 1 / slack)


def _meets_all(search: Search, ids: frozenset[str]) -> bool:
    return _meets(search, ids, search.chosen) and _meets(search, ids, search.held_out)


def _damage(search: Search, ids: Sequence[str], batches: Sequence[int]) -> float:
    return search.target.distance(search.variants.metrics(search.low(ids), batches))


def _costs(search: Search) -> dict[str, float]:
    """What the mixed-integer programme adds up: measured time, else one for each pin and its estimate."""
    added = added_times(search)
    if search.prices.measured:
        least = 1e-3 * max(max(added.values()), 1e-12)  # a pin that costs nothing still is one
        return {pin: max(time, least) for pin, time in added.items()}
    start = max(search.prices.plan(search.planned.resolved.formats), 1e-300)
    return {pin: 1.0 + time / start for pin, time in added.items()}


def added_times(search: Search) -> dict[str, float]:
    """Time that each candidate takes more in FP16 than lowered (in FP32 where it is lowered to FP16)."""
    formats = search.planned.resolved.formats
    high = "fp32" if search.planned.plan.default in ("fp16", "bf16") else "fp16"
    return {c.id: search.prices.raising(sorted(c.layers), formats, high) for c in search.candidates}


def _limits(search: Search) -> tuple[float, float]:
    """Most pins, and most added time in the unit of the prices."""
    ceiling = search.settings.ceiling
    price = math.inf if ceiling.price_ms is None else ceiling.price_ms
    if ceiling.price_share is not None:
        price = ceiling.price_share * search.prices.plan(search.planned.resolved.formats)
    return math.inf if ceiling.pins is None else ceiling.pins, price


def can_afford(search: Search, pins: Sequence[str]) -> bool:
    """Whether the pins keep to the user's ceiling."""
    return affordable(pins, added_times(search), *_limits(search))


def _under_ceiling(search: Search, ranking: Ranking, found: PinSearch) -> PinSearch:
    """A set within the ceiling that meets the target; where none is found, the one that comes nearest."""
    prices = added_times(search)
    sets = [*found.tried, *within(ranking.effects, prices, *_limits(search))]
    allowed = [s for s in sets if affordable(s, prices, *_limits(search))] or [frozenset[str]()]
    order = [effect.candidate.id for effect in ranking.effects]
    nearest = min(allowed, key=lambda ids: _damage(search, sorted(ids), search.chosen))
    if not _meets_all(search, nearest):
        return PinSearch("ceiling", [i for i in order if i in nearest], False, found.tried)
    pins = thinned(nearest, order, lambda ids: _meets_all(search, ids))
    return PinSearch("found", [i for i in order if i in pins], True, found.tried, used_held_out=True)


def _without_idle(search: Search, ranking: Ranking, found: PinSearch) -> PinSearch:
    """Raise, too, what costs accuracy and buys no measured time when lowered."""
    if found.outcome != "found" or not search.prices.measured:
        return found
    added = added_times(search)
    harmful = [e.candidate.id for e in ranking.effects if e.lowered_mean > 0 and e.raised_mean > 0]
    idle = [i for i in harmful if added[i] <= 0 and i not in found.pins]
    everything = [*found.pins, *idle]
    if not idle or not _meets_all(search, frozenset(everything)):
        return found
    return replace(found, pins=everything, idle=frozenset(idle))


def frontier(search: Search, found: PinSearch, fmt: str) -> list[Weighed]:
    """The best set of each size that was tried, on the batches held out; none of them is the chosen one."""
    tried = [ids for ids in found.tried if ids != frozenset(found.pins) and len(ids) < len(search.candidates)]
    sets = best_by_size(
        tried,
        lambda ids: _damage(search, sorted(ids), search.chosen),
        lambda ids: _damage(search, sorted(ids), search.held_out),
    )
    return [_weighed(search, ids, fmt) for ids in sets]


def _weighed(search: Search, ids: frozenset[str], fmt: str) -> Weighed:
    plan = pinned(search, sorted(ids), fmt)
    formats = search.planned.with_plan(plan).resolved.formats
    metrics = search.variants.metrics(search.low(ids), search.held_out)
    label = "no pins" if not ids else f"{len(ids)} pin{'' if len(ids) == 1 else 's'}"
    kind: Kind = "candidate" if ids else "start"
    return Weighed(label, kind, len(ids), metrics, search.prices.plan(formats), plan)
