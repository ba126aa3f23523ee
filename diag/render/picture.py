"""The picture of error along depth, as coordinates: one column per layer, in graph order.

The main field shows SQNR in dB. What has no place on that axis has lanes of its own: layers identical
to the reference above it, layers with non-finite values below it, layers that could not be seen at the
bottom. Paths carry all layers of a series at once, so that thousands of layers cost a few kilobytes; the
areas that answer hovering are at most `MAX_HOVERS`, each naming the worst of its layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diag.render.axis import Axis, Tick
from diag.render.cells import MISSING, is_broken, metric_text, sqnr_of
from diag.report.schema import Birth, LayerInfo, Report

WIDTH, HEIGHT = 1100.0, 360.0
LEFT, RIGHT = 104.0, WIDTH - 12.0
TOP, BOTTOM = 56.0, 276.0
EXACT_Y, BROKEN_Y, UNSEEN_Y, BLOCK_Y = 42.0, 294.0, 314.0, 338.0
MAX_HOVERS = 480
_MIN_LABEL_GAP, _MIN_BAND = 18.0, 6.0
_SERIES = (
    ("accumulated", "accumulated: with everything before it lowered too"),
    ("local", "local: with the reference's inputs"),
    ("engine", "engine: the built engine's tensor"),
)


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of layers of one block; every second one is shaded."""

    x: float
    width: float
    label: str
    shaded: bool


@dataclass(frozen=True, slots=True)
class Series:
    """One kind of error: `dots` holds a point per layer, `line` joins them (empty: not joined)."""

    name: str
    meaning: str
    dots: str
    line: str
    exact: str
    broken: str


@dataclass(frozen=True, slots=True)
class Hover:
    """An area over one or more layers, what hovering says, and the table row behind it."""

    x: float
    width: float
    title: str
    anchor: str


@dataclass(frozen=True, slots=True)
class BirthMark:
    x: float
    label: str
    title: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Picture:
    ticks: tuple[Tick, ...]
    bands: tuple[Band, ...]
    series: tuple[Series, ...]
    unseen: str
    hovers: tuple[Hover, ...]
    births: tuple[BirthMark, ...]
    has_exact: bool
    has_broken: bool
    description: str


def picture(report: Report) -> Picture | None:
    """The picture of `report`, or None when no layer has an error to show."""
    layers = report.layers
    values = [value for layer in layers for name, _ in _SERIES for value in _finite(_metrics(layer, name))]
    broken = any(is_broken(_metrics(layer, name)) for layer in layers for name, _ in _SERIES)
    if not layers or not (values or broken or any(_metrics(layer, "accumulated") for layer in layers)):
        return None
    axis = _axis(values)
    series = tuple(_series(layers, axis, name, meaning) for name, meaning in _SERIES)
    shown = tuple(item for item in series if item.dots or item.exact or item.broken)
    unseen = [index for index, layer in enumerate(layers) if layer.status == "not_observable"]
    return Picture(
        ticks=_ticks(axis),
        bands=_bands(layers),
        series=shown,
        unseen="".join(f"M{_x(index, len(layers)):.1f} {UNSEEN_Y - 5:g}v10" for index in unseen),
        hovers=_hovers(layers),
        births=_birth_marks(layers, report.births),
        has_exact=any(item.exact for item in shown),
        has_broken=any(item.broken for item in shown),
        description=f"SQNR in dB of {len(layers)} layers in graph order; the table below has the numbers.",
    )


def _metrics(layer: LayerInfo, series: str) -> dict[str, float]:
    if layer.status != "compared":
        return {}
    return {"accumulated": layer.accumulated, "local": layer.local, "engine": layer.engine}[series]


def _finite(metrics: dict[str, float]) -> Iterable[float]:
    sqnr_db = sqnr_of(metrics)
    return [] if sqnr_db is None or not math.isfinite(sqnr_db) else [sqnr_db]


def _axis(values: Sequence[float]) -> Axis:
    """Whole tens around the values, between -20 and 140 dB, at least 40 dB high."""
    low = max(-20, math.floor(min(values, default=0) / 10) * 10)
    high = min(140, math.ceil(max(values, default=60) / 10) * 10)
    low = min(low, 100)
    return Axis(low, max(high, low + 40), BOTTOM, TOP)


def _ticks(axis: Axis) -> tuple[Tick, ...]:
    step = 10 if axis.high - axis.low <= 80 else 20
    first = math.ceil(axis.low / step) * step
    return tuple(Tick(axis.at(db), f"{db:g}") for db in range(first, int(axis.high) + 1, step))


def _x(index: int, total: int) -> float:
    return LEFT + (index + 0.5) * (RIGHT - LEFT) / total


def _series(layers: list[LayerInfo], axis: Axis, name: str, meaning: str) -> Series:
    dots, exact, broken, line = [], [], [], []
    joined = False
    for index, layer in enumerate(layers):
        metrics = _metrics(layer, name)
        sqnr_db = sqnr_of(metrics)
        x = f"{_x(index, len(layers)):.1f}"
        lost = bool(metrics) and is_broken(metrics)
        if lost:
            broken.append(f"M{x} {BROKEN_Y:g}m-4-4 8 8m0-8-8 8")
        if sqnr_db is None or lost or math.isinf(sqnr_db):
            if sqnr_db == math.inf and not lost:
                exact.append(f"M{x} {EXACT_Y:g}h0")
            joined = False
            continue
        y = f"{axis.at(sqnr_db):.1f}"
        dots.append(f"M{x} {y}h0")
        line.append(f"{'L' if joined else 'M'}{x} {y}")
        joined = True
    shown_line = "".join(line) if name == "accumulated" else ""
    return Series(name, meaning, "".join(dots), shown_line, "".join(exact), "".join(broken))


def _bands(layers: list[LayerInfo]) -> tuple[Band, ...]:
    """One band per run of layers with the same block number; labels where there is room."""
    step = (RIGHT - LEFT) / len(layers)
    bands: list[Band] = []
    start, last_label = 0, -math.inf
    for index in range(1, len(layers) + 1):
        block = layers[start].block
        if index < len(layers) and layers[index].block == block:
            continue
        x, width = LEFT + start * step, (index - start) * step
        start = index
        if block is None:
            continue
        middle = x + width / 2
        fits = middle - last_label >= _MIN_LABEL_GAP + 6 * len(str(block))
        last_label = middle if fits else last_label
        shaded = len(bands) % 2 == 0 and width >= _MIN_BAND
        bands.append(Band(x, width, str(block) if fits else "", shaded))
    return tuple(bands)


def _hovers(layers: list[LayerInfo]) -> tuple[Hover, ...]:
    bins = min(len(layers), MAX_HOVERS)
    edges = [index * len(layers) // bins for index in range(bins + 1)]
    step = (RIGHT - LEFT) / len(layers)
    return tuple(
        _hover(layers[first:end], first, LEFT + first * step, (end - first) * step)
        for first, end in itertools.pairwise(edges)
    )


def _hover(group: list[LayerInfo], first: int, x: float, width: float) -> Hover:
    offset = min(range(len(group)), key=lambda index: _badness(group[index]))
    layer = group[offset]
    lines = [layer.name, f"{layer.role}, {layer.op_type}, {layer.format}"]
    if layer.status == "compared":
        for name, _ in _SERIES:
            value = sqnr_of(_metrics(layer, name))
            if value is not None:
                lines.append(f"{name} SQNR {metric_text('sqnr_db', value)}{' dB' * math.isfinite(value)}")
    else:
        lines.append(f"{layer.status.replace('_', ' ')} {MISSING} {layer.reason}".rstrip(f" {MISSING}"))
    if len(group) > 1:
        lines.append(f"(worst of layers {first + 1} to {first + len(group)})")
    return Hover(x, width, "\n".join(lines), f"L{first + offset + 1}")


def _badness(layer: LayerInfo) -> float:
    metrics = _metrics(layer, "accumulated")
    if is_broken(metrics):
        return -math.inf
    sqnr_db = sqnr_of(metrics)
    return math.inf if sqnr_db is None else sqnr_db


def _birth_marks(layers: list[LayerInfo], births: list[Birth]) -> tuple[BirthMark, ...]:
    """A mark per birth, numbered as in the list of births; numbers only where they do not overlap."""
    places: dict[str, int] = {}
    for index, layer in enumerate(layers):
        places.setdefault(layer.name, index)
        places.setdefault(layer.id, index)
    found = [(places[birth.layer], n) for n, birth in enumerate(births, start=1) if birth.layer in places]
    marks: list[BirthMark] = []
    last_label = -math.inf
    for index, number in sorted(found):
        x = _x(index, len(layers))
        fits = x - last_label >= _MIN_LABEL_GAP
        last_label = x if fits else last_label
        title = f"{number}: error begins at {births[number - 1].layer}"
        marks.append(BirthMark(x, str(number) if fits else "", title, f"birth-{number}"))
    return tuple(marks)
