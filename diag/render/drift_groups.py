"""Slices, dates, requests, costs and advice of a drift report, as tables and cards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diag.render.cells import MISSING, Cell, Column, Row, Table, count
from diag.report.drift import Drift, DriftAdvice, DriftDay, DriftSlice

WORDS = {"ok": "no drift", "warn": "worth a look", "fail": "drifts"}
TONES = {"ok": "ok", "warn": "warn", "fail": "bad"}


@dataclass(frozen=True, slots=True)
class Day:
    """One bar of the timeline."""

    x: float
    width: float
    y: float
    height: float
    tone: str
    title: str
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    days: tuple[Day, ...]
    description: str
    began: str
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class AdviceCard:
    action: str
    tone: str
    text: str
    gain: str
    tensors: tuple[str, ...]
    left_out: int
    requests: tuple[str, ...]
    command: str


def percent(share: float) -> str:
    """A share in percent, as precise as is useful."""
    value = 100 * share
    return (
        "0" if value == 0 else "<0.001" if value < 0.001 else f"{value:.3f}" if value < 1 else f"{value:.1f}"
    )


def db_text(value: float) -> str:
    return "exact" if value >= 300 else f"{value + 0.0:.1f}"


_GROUP_COLUMNS = (
    Column("Requests", kind="num"),
    Column("Verdict"),
    Column("Drifting tensors", kind="num", worst_first="desc"),
    Column("Begins at"),
    Column("Worst loss", "dB", "num", worst_first="desc"),
    Column("Most clipped", "%", "num", worst_first="desc"),
)


def _group_cells(group: DriftSlice | DriftDay) -> tuple[Cell, ...]:
    if not group.judged:
        few = Cell("too few requests", css="mute")
        return Cell(f"{group.requests:,}", group.requests), few, *[Cell(MISSING, None, "mute")] * 4
    tone = {"fail": "bad", "warn": "warned", "ok": "ok"}[group.level]
    return (
        Cell(f"{group.requests:,}", group.requests),
        Cell(WORDS[group.level], css=tone),
        Cell(str(group.drifting), group.drifting),
        Cell(group.cause or MISSING, css="name" if group.cause else "mute"),
        Cell(f"{group.worst_sqnr_loss_db + 0.0:.1f}", group.worst_sqnr_loss_db),
        Cell(percent(group.worst_saturation), group.worst_saturation),
    )


def slices_table(slices: list[DriftSlice]) -> Table | None:
    if not slices:
        return None
    needed = Column("Calibration needs", kind="num", hint="requests of the slice until its ranges are known")
    columns = (Column("Slice"), *_GROUP_COLUMNS, needed)
    return Table(columns, tuple(Row((Cell(s.name, s.name), *_group_cells(s), _needed(s))) for s in slices))


def _needed(part: DriftSlice) -> Cell:
    if part.level == "ok" or not part.judged:
        return Cell(MISSING, None, "mute")
    if part.requests_needed is None:
        return Cell("more than seen", None)
    return Cell(str(part.requests_needed), part.requests_needed)


def requests_table(drift: Drift) -> Table | None:
    if not drift.worst_requests:
        return None
    columns = (
        Column("Request"),
        Column("Slice"),
        Column("In tensor"),
        Column("Error over energy", "%", "num"),
    )
    rows = (
        Row(
            (
                Cell(worst.request, css="name"),
                Cell(worst.slice or MISSING),
                Cell(worst.tensor, css="name"),
                Cell(_ratio_text(worst.noise_ratio), worst.noise_ratio),
            )
        )
        for worst in drift.worst_requests
    )
    return Table(columns, tuple(rows))


def _ratio_text(ratio: float) -> str:
    return "not finite" if math.isinf(ratio) else percent(ratio)


def days_table(days: list[DriftDay]) -> Table | None:
    if not days:
        return None
    columns = (Column("Date"), *_GROUP_COLUMNS)
    return Table(columns, tuple(Row((Cell(day.date, day.date), *_group_cells(day))) for day in days))


_LINE_WIDTH, _LINE_HEIGHT, _LINE_BASE = 1320.0, 120.0, 96.0


def timeline(drift: Drift) -> Timeline | None:
    days = drift.timeline
    if len(days) < 2:
        return None
    width = _LINE_WIDTH / len(days)
    most = max(max(day.worst_sqnr_loss_db for day in days), 6.0)
    every = -(-len(days) // 12)
    bars = []
    for n, day in enumerate(days):
        height = max(min(day.worst_sqnr_loss_db / most, 1.0), 0.02) * (_LINE_BASE - 8)
        title = f"{day.date}: {WORDS[day.level]}, worst loss {day.worst_sqnr_loss_db:.1f} dB"
        bars.append(
            Day(
                n * width + 1,
                max(width - 2, 1),
                _LINE_BASE - height,
                height,
                TONES[day.level],
                title,
                day.date if n % every == 0 else "",
            )
        )
    words = f"Worst loss of SQNR over {count(len(days), 'date')}, {days[0].date} to {days[-1].date}"
    return Timeline(tuple(bars), words, drift.began or "", _LINE_WIDTH, _LINE_HEIGHT)


def _lost_cell(lost_db: float) -> Cell:
    if math.isnan(lost_db):
        return Cell(MISSING, None, "mute")
    tone = "bad" if lost_db >= 6 else "warned" if lost_db >= 3 else ""
    return Cell(f"{lost_db + 0.0:.1f}", lost_db, tone)


def costs_table(drift: Drift) -> Table | None:
    if not drift.costs:
        return None
    columns = (
        Column("Layer"),
        Column("Reads", hint="the tensor whose drift stands beside it"),
        Column("Drift of what it reads"),
        Column("INT8 on calibration", "dB", "num", "accumulated SQNR of the quantized model"),
        Column("INT8 on production", "dB", "num", "accumulated SQNR of the quantized model"),
        Column("Lost", "dB", "num", worst_first="desc"),
    )
    rows = []
    for cost in drift.costs:
        before = cost.calibration_sqnr_db
        lost = math.nan if before is None else before - cost.production_sqnr_db
        tone = {"fail": "bad", "warn": "warned", "ok": ""}[cost.level]
        rows.append(
            Row(
                (
                    Cell(cost.layer, css="name"),
                    Cell(cost.tensor, css="name"),
                    Cell(WORDS[cost.level], css=tone),
                    Cell(MISSING if before is None else db_text(before), before),
                    Cell(db_text(cost.production_sqnr_db), cost.production_sqnr_db),
                    _lost_cell(lost),
                )
            )
        )
    return Table(columns, tuple(rows))


_SHOWN = 12


def advice_card(advice: DriftAdvice) -> AdviceCard:
    gain = "" if advice.gain_db is None else f"predicted gain {advice.gain_db:+.1f} dB in the worst tensor"
    tone = "ok" if advice.action == "nothing" else "plain"
    return AdviceCard(
        action=advice.action.replace("-", " "),
        tone=tone,
        text=advice.text,
        gain=gain,
        tensors=tuple(advice.tensors[:_SHOWN]),
        left_out=max(len(advice.tensors) - _SHOWN, 0),
        requests=tuple(advice.requests),
        command=advice.command,
    )
