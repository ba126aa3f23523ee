"""The picture of accuracy against price, as coordinates: every plan that a search weighed, rivals too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diag.numerics.table import METRICS
from diag.render.axis import Axis, Tick
from diag.render.cells import Cell, Column, Row, Table, count, heading, metric_text, with_unit
from diag.report.schema import SearchInfo, SearchPoint

WIDTH, HEIGHT = 760.0, 360.0
LEFT, RIGHT = 84.0, WIDTH - 24.0
TOP, BOTTOM = 24.0, 300.0
_MARGIN = 0.08
_LABEL_GAP = 22.0
_LABEL_WIDTH = 190.0
"""Of a long label on a narrow screen, where text is drawn larger."""
_LABEL_SIDE = 12.0
"""From a mark's centre to its label."""
_KINDS = {
    "start": ("without pins", "M{x} {y}m-5 4h10l-5-9z"),
    "candidate": (
        "other sets of so many pins, the best of each size on the batches held out",
        "M{x} {y}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    ),
    "chosen": ("chosen", "M{x} {y}m-8 0l8-8l8 8l-8 8z"),
    "rival": ("one format throughout", "M{x} {y}m-5-5h10v10h-10z"),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One plan: its shape, and its label, which may stand away from it (then a line leads to it)."""

    kind: str
    path: str
    x: float
    y: float
    label: str
    label_x: float
    label_y: float
    side: str
    """Of the mark on which the label stands: `right`, `left` or `above`."""
    lead: str
    title: str


@dataclass(frozen=True, slots=True)
class Key:
    kind: str
    path: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Pareto:
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    target_y: float | None
    target: str
    y_title: str
    x_title: str
    frontier: str
    """The staircase of plans that no other beats in both."""
    keys: tuple[Key, ...]
    table: Table
    facts: tuple[str, ...]
    description: str
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM


def pareto(info: SearchInfo | None) -> Pareto | None:
    """The picture of a search, or None where there is nothing to show."""
    if info is None or not info.points:
        return None
    values = [p.value for p in info.points if math.isfinite(p.value)]
    if not values:
        return None
    x = _axis([p.price for p in info.points], LEFT, RIGHT)
    y = _axis([*values, info.bound], BOTTOM, TOP)
    unit = unit_of(info.metric)
    kinds = list(dict.fromkeys(p.kind for p in info.points))
    return Pareto(
        marks=_marks(info.points, x, y, info.metric),
        x_ticks=tuple(Tick(x.at(t), f"{t:.4g}") for t in _round_numbers(x)),
        y_ticks=tuple(Tick(y.at(t), f"{t:.6g}") for t in _round_numbers(y)),
        target_y=y.at(info.bound),
        target=info.target,
        y_title=f"{heading(info.metric)}{f', {unit}' if unit else ''} "
        f"({'higher' if info.higher_is_better else 'lower'} is better)",
        x_title="time over that of the plan without pins, "
        + ("measured" if info.measured_prices else "estimated")
        + " (left is better)",
        frontier=_frontier(info, x, y),
        keys=tuple(Key(kind, _KINDS[kind][1].format(x=8, y=10), _KINDS[kind][0]) for kind in kinds),
        table=_table(info, unit),
        facts=(info.proof, f"Prices: {info.prices}.", *info.notes),
        description=f"{heading(info.metric)} of {count(len(info.points), 'plan')} against their time; "
        "the table below has the numbers.",
    )


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Around the values, with some room."""
    low, high = min(values), max(values)
    room = (high - low) * _MARGIN or max(abs(high) * _MARGIN, 1e-6)
    return Axis(low - room, high + room, start, end)


def _round_numbers(axis: Axis) -> list[float]:
    """Five to ten round numbers: steps of 1, 2 or 5 times a power of ten."""
    raw = (axis.high - axis.low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw)
    first = math.ceil(axis.low / step)
    return [step * i for i in range(first, math.floor(axis.high / step) + 1)]


def _marks(points: Sequence[SearchPoint], x: Axis, y: Axis, metric: str) -> tuple[Mark, ...]:
    """Labels of near marks are moved apart. The chosen mark is drawn first, since it is large."""
    marks = [_mark(p, x, y, metric) for p in points]
    named = sorted((m for m in marks if m.side != "above"), key=lambda m: (m.y, m.x))
    heights = _label_heights(named)
    apart = [replace(m, label_y=h, lead=_lead(m, h)) for m, h in zip(named, heights, strict=True)]
    counts = _without_meeting([m for m in marks if m.side == "above"])
    return tuple(sorted([*apart, *counts], key=lambda mark: mark.kind != "chosen"))


def _label_heights(marks: Sequence[Mark]) -> list[float]:
    """Baselines of the labels of marks that come from the top down: apart, and above the axis."""
    heights = [mark.label_y for mark in marks]
    for i, mark in enumerate(marks):
        above = [heights[j] + _LABEL_GAP for j in range(i) if _may_meet(marks[j], mark)]
        heights[i] = max([heights[i], *above])
    for i in reversed(range(len(marks))):
        near = (j for j in range(i + 1, len(marks)) if _may_meet(marks[j], marks[i]))
        heights[i] = min([heights[i], BOTTOM, *(heights[j] - _LABEL_GAP for j in near)])
    return heights


def _may_meet(one: Mark, other: Mark) -> bool:
    return abs(one.x - other.x) < _LABEL_WIDTH * (1 if one.side == other.side else 2)


def _lead(mark: Mark, label_y: float) -> str:
    """A line to a label that stands away from its mark."""
    moved = abs(label_y - mark.label_y) > _LABEL_GAP / 2
    return f"M{mark.x:.1f} {mark.y:.1f}L{mark.label_x:.1f} {label_y - 4:.1f}" if moved else ""


def _without_meeting(counts: Sequence[Mark]) -> list[Mark]:
    """Numbers above their marks; one that would lie on another is left to the table."""
    kept: list[Mark] = []
    for mark in counts:
        free = all(
            abs(mark.x - m.x) >= _LABEL_GAP or abs(mark.y - m.y) >= _LABEL_GAP for m in kept if m.label
        )
        kept.append(mark if free else replace(mark, label=""))
    return kept


def _mark(point: SearchPoint, x: Axis, y: Axis, metric: str) -> Mark:
    """Sets of pins that were not chosen have their number above, the others their name beside."""
    px, py = x.at(point.price), _height(point, y)
    value = with_unit(metric, point.value) if math.isfinite(point.value) else "not finite"
    title = f"{point.label}: {heading(metric)} {value}, {point.price:.3g} times the time, {_word(point)}"
    path = _KINDS[point.kind][1].format(x=f"{px:.1f}", y=f"{py:.1f}")
    if point.kind == "candidate":
        return Mark(point.kind, path, px, py, str(point.pins), px, py - 8, "above", "", title)
    right = px < (LEFT + RIGHT) / 2
    label_x = px + (_LABEL_SIDE if right else -_LABEL_SIDE)
    side = "right" if right else "left"
    return Mark(point.kind, path, px, py, point.label, label_x, py + 4, side, "", title)


def _height(point: SearchPoint, y: Axis) -> float:
    """Where the value is not finite, its mark lies on the bottom line."""
    return y.at(point.value) if math.isfinite(point.value) else BOTTOM


def _word(point: SearchPoint) -> str:
    return "meets the target" if point.met else "misses the target"


def _frontier(info: SearchInfo, x: Axis, y: Axis) -> str:
    """A staircase through the plans that no cheaper one equals."""
    sign = 1 if info.higher_is_better else -1
    steps: list[SearchPoint] = []
    for point in sorted(info.points, key=lambda p: (p.price, -sign * p.value)):
        if math.isfinite(point.value) and (not steps or sign * point.value > sign * steps[-1].value):
            steps.append(point)
    path = ""
    for point in steps:
        px, py = f"{x.at(point.price):.1f}", f"{y.at(point.value):.1f}"
        path += f"H{px}V{py}" if path else f"M{px} {py}"
    return path


def _table(info: SearchInfo, unit: str) -> Table:
    columns = (
        Column("plan"),
        Column("pins", kind="num"),
        Column(heading(info.metric), unit=unit, kind="num"),
        Column("time", unit="of that without pins", kind="num"),
        Column("target"),
    )
    rows = tuple(_row(point, info.metric) for point in info.points)
    return Table(columns, rows)


def unit_of(metric: str) -> str:
    """Unit of a metric for a heading; empty for plain ratios and for a user's own metric."""
    return METRICS[metric].unit if metric in METRICS else ""


def _row(point: SearchPoint, metric: str) -> Row:
    value = metric_text(metric, point.value) if math.isfinite(point.value) else "not finite"
    return Row(
        (
            Cell(point.label, sub="chosen" if point.kind == "chosen" else ""),
            Cell(str(point.pins), float(point.pins)),
            Cell(value, point.value if math.isfinite(point.value) else None),
            Cell(f"{point.price:.3f}", point.price),
            Cell("met" if point.met else "missed", css="ok" if point.met else "bad"),
        )
    )
