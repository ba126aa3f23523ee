"""Parts of production, each judged on its own, and the part that the report is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diag.drift.compare import Compared, compare
from diag.drift.judge import LEVELS, Level
from diag.drift.merge import merge
from diag.drift.rules import DriftRules
from diag.drift.stats import Stats
from diag.errors import UsageError
from diag.pipeline.drift.sources import Sources


@dataclass(frozen=True)
class Part:
    """A slice or a date. `compared` is None where there are too few requests to judge."""

    name: str
    stats: Stats
    compared: Compared | None

    @property
    def level(self) -> Level:
        return self.compared.verdict.level if self.compared is not None else "ok"


@dataclass(frozen=True)
class Focus:
    """What a report's tensors speak of: all of production (`name` empty), or the part that drifts."""

    name: str
    stats: Stats
    compared: Compared


def slices_of(sources: Sources, rules: DriftRules) -> tuple[Part, ...]:
    """Every slice of production."""
    return _parts(((group.slice, group.stats) for group in sources.groups), sources, rules)


def days_of(sources: Sources, rules: DriftRules) -> tuple[Part, ...]:
    """Every date of production, in order."""
    return _parts(((group.date, group.stats) for group in sources.groups), sources, rules)


def _parts(named: Iterable[tuple[str, Stats]], sources: Sources, rules: DriftRules) -> tuple[Part, ...]:
    groups: dict[str, list[Stats]] = {}
    for name, stats in named:
        if name:
            groups.setdefault(name, []).append(stats)
    return tuple(_part(name, _merged(parts), sources, rules) for name, parts in sorted(groups.items()))


def _part(name: str, stats: Stats, sources: Sources, rules: DriftRules) -> Part:
    few = stats.source.requests < rules.least_requests
    found = None if few else compare(sources.sides, sources.production_sides(stats), rules)
    return Part(name, stats, found)


def _merged(parts: list[Stats]) -> Stats:
    return parts[0] if len(parts) == 1 else merge(parts)


def began(days: Iterable[Part]) -> str | None:
    """The first date from which every judged date drifts."""
    found = None
    for day in reversed([day for day in days if day.compared is not None]):
        if day.level != "fail":
            break
        found = day.name
    return found


def focus_of(sources: Sources, slices: tuple[Part, ...], days: tuple[Part, ...], rules: DriftRules) -> Focus:
    """All of production, unless drift hides in a part: the dates since it began, or the worst slice.

    Raises UsageError when the two sides hold no tensor in common that can be judged.
    """
    whole = _part("", sources.production, sources, rules)
    assert whole.compared is not None
    if not whole.compared.pairs:
        raise UsageError(
            "the two sides hold no tensor in common that has a calibrated range; outputs have none",
            'Profile with --calibration TABLE; diag.Profiler counts calibrated tensors with tensors="all".',
        )
    since = began(days)
    if since is not None and since != days[0].name:
        recent = _part(f"since {since}", _merged([d.stats for d in days if d.name >= since]), sources, rules)
        if recent.compared is not None and recent.level == "fail":
            return Focus(recent.name, recent.stats, recent.compared)
    worst = max(slices, key=_badness, default=whole)
    if worst.compared is not None and LEVELS.index(worst.level) > LEVELS.index(whole.level):
        return Focus(f"slice {worst.name}", worst.stats, worst.compared)
    return Focus("", whole.stats, whole.compared)


def _badness(part: Part) -> tuple[int, float]:
    return LEVELS.index(part.level), part.compared.worst_loss_db if part.compared else 0.0
