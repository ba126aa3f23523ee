"""The drift part of a page: which tensors drift, each with a small histogram, and all that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diag.render.cells import MISSING, Cell, Column, Fact, Row, Table, count
from diag.render.drift_groups import (
    TONES,
    WORDS,
    AdviceCard,
    Timeline,
    advice_card,
    costs_table,
    days_table,
    db_text,
    percent,
    requests_table,
    slices_table,
    timeline,
)
from diag.report.drift import Drift, DriftTensor

WIDTH, HEIGHT = 200.0, 46.0
_BASE = 44.0
"""Where bars stand."""
_DECADES = 6.0
"""Heights are logarithmic: a share of 1e-6 is as good as none."""
PICTURES = 60
"""Tensors that get a histogram; the others are listed without."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Two curves over the same bins, as SVG paths, and where the range ends."""

    calibration: str
    """A closed area."""
    production: str
    """A line."""
    clip_x: float
    label: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of the ranked table; cells follow the columns behind the picture."""

    name: str
    layer: str
    level: str
    tone: str
    place: int
    picture: Histogram | None
    cells: tuple[Cell, ...]
    css: str


@dataclass(frozen=True, slots=True)
class DriftView:
    sides: tuple[Fact, ...]
    columns: tuple[Column, ...]
    rows: tuple[TensorRow, ...]
    others: Table | None
    slices: Table | None
    requests: Table | None
    timeline: Timeline | None
    days: Table | None
    costs: Table | None
    costs_sentence: str
    advice: tuple[AdviceCard, ...]


def drift_view(drift: Drift) -> DriftView:
    """Everything that the page shows of it."""
    rows = [_row(drift, tensor) for tensor in ranked(drift)]
    return DriftView(
        sides=_sides(drift),
        columns=_COLUMNS,
        rows=tuple(rows[:PICTURES]),
        others=_others(rows[PICTURES:]),
        slices=slices_table(drift.slices),
        requests=requests_table(drift),
        timeline=timeline(drift),
        days=days_table(drift.timeline),
        costs=costs_table(drift),
        costs_sentence=drift.costs_sentence,
        advice=tuple(map(advice_card, drift.advice)),
    )


def ranked(drift: Drift) -> list[DriftTensor]:
    """The cause first, then by level and by the loss of SQNR."""

    def key(tensor: DriftTensor) -> tuple[bool, int, bool, float]:
        loss = tensor.figures["sqnr_loss_db"].value
        level = ("fail", "warn", "ok").index(tensor.level)
        return tensor.tensor != drift.cause, level, not tensor.nonfinite, -loss

    return sorted(drift.tensors, key=key)


def _sides(drift: Drift) -> tuple[Fact, ...]:
    facts = [
        Fact("Calibrated on", f"{drift.calibration}; {count(drift.calibration_requests, 'request')}"),
        Fact("Production", f"{drift.production}; {count(drift.production_requests, 'request')}"),
    ]
    if drift.focus:
        facts.append(Fact("Shown here", f"{drift.focus} alone", "warn"))
    if drift.cause:
        behind = (
            f", {count(len(drift.consequences), 'tensor')} behind it follow" if drift.consequences else ""
        )
        facts.append(Fact("Begins at", drift.cause + behind, "bad" if drift.level == "fail" else "warn"))
    return tuple(facts)


_COLUMNS = (
    Column("SQNR", "dB", "num", "Of the tensor itself in INT8 on the calibration data, then on production"),
    Column("Loss", "dB", "num", "SQNR that the calibrated scale loses on production", worst_first="desc"),
    Column("Clipped", "%", "num", "Share of production beyond the range; 95 % interval over requests"),
    Column("p99.99 / range", "", "num", "Above 1 values are clipped, far below 1 codes are idle"),
    Column("W1", "steps", "num", "Wasserstein-1 distance in quantization steps", worst_first="desc"),
    Column(
        "PSI", "", "num", "Over bins of codes; below it, what the calibration data show against themselves"
    ),
    Column("Notes"),
)


def _row(drift: Drift, tensor: DriftTensor) -> TensorRow:
    place = next(n for n, other in enumerate(drift.tensors, 1) if other.tensor == tensor.tensor)
    return TensorRow(
        name=tensor.tensor,
        layer=tensor.layer if tensor.layer != tensor.tensor else "graph input",
        level=WORDS[tensor.level],
        tone=TONES[tensor.level],
        place=place,
        picture=_histogram(drift, tensor),
        cells=_cells(tensor),
        css="born" if tensor.tensor == drift.cause else "",
    )


def _cells(tensor: DriftTensor) -> tuple[Cell, ...]:
    figures = tensor.figures
    low, high = tensor.saturation_interval
    sqnr = f"{db_text(tensor.calibration_sqnr_db)} → {db_text(tensor.production_sqnr_db)}"
    share = figures["saturation"].value
    psi = f"against itself {tensor.psi_null:.2f}" if tensor.psi_null is not None else ""
    return (
        Cell(sqnr, tensor.production_sqnr_db),
        _judged(tensor, "sqnr_loss_db", f"{figures['sqnr_loss_db'].value + 0.0:.1f}"),
        _judged(tensor, "saturation", percent(share), _interval(low, high)),
        _judged(tensor, "overflow", f"{figures['overflow'].value:.2f}"),
        _judged(tensor, "wasserstein_steps", f"{figures['wasserstein_steps'].value:.2f}"),
        Cell(f"{tensor.psi:.2f}", tensor.psi, sub=psi),
        Cell("; ".join(_notes(tensor)) or MISSING),
    )


def _interval(low: float, high: float) -> str:
    """Empty where nothing is known."""
    return "" if (low, high) == (0.0, 1.0) else f"{percent(low)} to {percent(high)}"


def _judged(tensor: DriftTensor, name: str, text: str, sub: str = "") -> Cell:
    figure = tensor.figures[name]
    hint = "" if figure.null is None else f"halves of the calibration data: {figure.null:.3g}"
    css = {"fail": "bad", "warn": "warned", "ok": ""}[figure.level]
    return Cell(text, figure.value, css, hint, sub)


def _notes(tensor: DriftTensor) -> list[str]:
    notes = []
    if tensor.nonfinite:
        notes.append(f"{count(tensor.nonfinite, 'value')} not finite")
    if tensor.figures["under_use"].level != "ok":
        wide = tensor.figures["under_use"].value
        notes.append("all zero" if math.isinf(wide) else f"range {wide:.1f} times as wide as needed")
    if math.isfinite(tensor.absmax_ratio) and not 0.8 <= tensor.absmax_ratio <= 1.25:
        notes.append(f"largest value {tensor.absmax_ratio:.2g} times calibration's")
    if tensor.dead_codes >= 0.1:
        notes.append(f"{100 * tensor.dead_codes:.0f} % of the codes dead")
    if tensor.alive_channels:
        notes.append(f"{count(len(tensor.alive_channels), 'channel')} came alive")
    return notes


def _histogram(drift: Drift, tensor: DriftTensor) -> Histogram | None:
    edges = drift.histogram_edges
    bins = len(edges) - 1
    if bins < 1 or len(tensor.calibration_shares) != bins or len(tensor.production_shares) != bins:
        return None
    width = WIDTH / bins
    clip = next((n for n, edge in enumerate(edges) if edge >= 127.0), bins) * width
    words = (
        f"Magnitudes in steps: production clips {percent(tensor.figures['saturation'].value)} %, its loss is "
        f"{tensor.figures['sqnr_loss_db'].value:.1f} dB"
    )
    return Histogram(
        f"M0 {_BASE:g}{_steps(tensor.calibration_shares, width)}V{_BASE:g}Z",
        f"M0 {_BASE:g}{_steps(tensor.production_shares, width)}",
        clip,
        words,
    )


def _steps(shares: list[float], width: float) -> str:
    """One step a bin, from left to right, up to the last that is not empty."""
    last = max((n for n, share in enumerate(shares, 1) if share > 0), default=0)
    parts = []
    for n, share in enumerate(shares[:last]):
        height = max(0.0, 1 + math.log10(share) / _DECADES) * (_BASE - 2) if share > 0 else 0.0
        parts.append(f"V{_BASE - height:.1f}H{(n + 1) * width:.1f}")
    return "".join([*parts, f"V{_BASE:g}"])


def _others(rows: list[TensorRow]) -> Table | None:
    if not rows:
        return None
    columns = (Column("#", kind="num"), Column("Tensor"), Column("Verdict"), *_COLUMNS)
    made = (
        Row((Cell(str(r.place), r.place), Cell(r.name, css="name", sub=r.layer), Cell(r.level), *r.cells))
        for r in rows
    )
    return Table(columns, tuple(made))
