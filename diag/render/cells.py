"""Numbers and facts as cells: the text that is shown, the key that sorts it, the class that colours it.

Cells hold plain text. Escaping is the template's work, and only there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diag.numerics.table import METRICS, Metric

MISSING = "—"
"""Shown where there is no value. Never 0, which would claim a measurement."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One table cell. `sort_key` is None where there is no value: such cells sort last in both directions."""

    text: str
    sort_key: float | str | None = None
    css: str = ""
    hint: str = ""
    """What hovering says."""
    sub: str = ""
    """A second, quieter line."""

    @property
    def explicit_key(self) -> str | None:
        """The sort key as the page must write it, or None when the page can read it from the text."""
        if self.sort_key is None or isinstance(self.sort_key, str):
            return None
        try:
            readable = math.isclose(float(self.text), self.sort_key, rel_tol=1e-2)
        except ValueError:
            readable = False
        return None if readable else _script_number(self.sort_key)


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading. `kind` says how it sorts: `num` or `text`."""

    title: str
    unit: str = ""
    kind: str = "text"
    hint: str = ""
    filter: bool = False
    """Whether the page offers a choice of this column's values."""
    worst_first: str = ""
    """`asc` or `desc`: the direction in which the first click shows the worst first."""


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[Cell, ...]
    css: str = ""
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def number_classes(self) -> tuple[str, ...]:
        """Per column, the class that aligns its numbers."""
        return tuple("num" if column.kind == "num" else "" for column in self.columns)


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and what it is, for a description list."""

    name: str
    text: str
    css: str = ""


def _script_number(value: float) -> str:
    """A float as JavaScript's Number() reads it."""
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return f"{value:.12g}"


def metric_text(name: str, value: float) -> str:
    """A metric's value without its unit, as precise as is useful.

    NaN and infinities are words and signs; an SQNR of infinity is `exact`. A share or cosine just under
    1 is never rounded up to 1.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        exact = value > 0 and name.endswith("sqnr_db")
        return "exact" if exact else ("∞" if value > 0 else "−∞")
    if name.endswith("_db"):
        return f"{round(value, 1) + 0.0:.1f}"
    if name in ("cosine", "top1"):
        return _share_text(value, 5 if name == "cosine" else 4)
    if float(value).is_integer() and abs(value) < 1e15 and (abs(value) >= 1000 or _is_count(name)):
        return f"{int(value):,}"
    # Adding zero turns -0 into 0.
    return f"{float(f'{value:.3g}') + 0.0:.3g}"


def _is_count(name: str) -> bool:
    return METRICS[name].unit in ("elements", "rows") if name in METRICS else False


def _share_text(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    if value < 1 and float(text) == 1:
        return f">{1 - 10**-digits:.{digits}f}"
    return text


def with_unit(name: str, value: float) -> str:
    """A metric's value with its unit, for sentences."""
    text = metric_text(name, value)
    unit = METRICS[name].unit if name in METRICS else ""
    return f"{text} {unit}" if unit in ("dB", "nats") and text != "exact" else text


def metric_cell(name: str, value: float | None) -> Cell:
    """A cell for a metric; a missing value is a dash, and what is not finite is marked."""
    if value is None:
        return Cell(MISSING, None, "mute")
    if math.isnan(value):
        # NaN is worse than any number, so that sorting by the worst begins with it.
        worst = math.inf if better(name) == "lower" else -math.inf
        return Cell("NaN", worst, "bad", "not a number")
    text = metric_text(name, value)
    if text == "exact":
        return Cell(text, value, "exact", "identical to the reference")
    css = "bad" if math.isinf(value) or (name in ("nonfinite", "zero_collapsed_rows") and value > 0) else ""
    return Cell(text, value, css)


def metric_column(name: str, title: str = "") -> Column:
    """The heading of a metric's column."""
    metric = METRICS.get(name, Metric(name, "", "none", ""))
    first = {"higher": "asc", "lower": "desc"}.get(metric.better, "")
    unit = metric.unit if metric.unit in ("dB", "nats") else ""
    return Column(title or heading(name), unit, "num", metric.meaning, worst_first=first)


def heading(name: str) -> str:
    """A metric's name for people. Other words are left alone: they may hold a node's name."""
    return _HEADINGS.get(name, name.replace("_", " ") if name.isidentifier() else name)


def better(name: str) -> str:
    """Which way is better for a metric; `none` for one that the table does not know."""
    return METRICS[name].better if name in METRICS else "none"


_HEADINGS = {
    "sqnr_db": "SQNR",
    "rel_l2": "Relative L2",
    "cosine": "Cosine",
    "max_abs": "Max abs error",
    "mean_error": "Mean error",
    "channel_min_sqnr_db": "Worst channel",
    "nonfinite": "Not finite",
    "zero_collapsed_rows": "Zeroed rows",
    "kl": "KL",
    "top1": "Top-1",
    "flips": "Flips",
    "worst_batch_sqnr_db": "Worst batch",
    "elements": "Elements",
    "reference_rms": "Ref. RMS",
    "reference_absmax": "Ref. absmax",
    "lowered_damage": "Damage alone (1 allowed)",
    "raised_gain": "Removed alone (1 allowed)",
    "calibration_sqnr_db": "SQNR on calibration, dB",
    "production_sqnr_db": "SQNR on production, dB",
    "sqnr_loss_db": "SQNR lost, dB",
    "saturation": "Clipped share",
    "saturation_low": "Clipped share, low",
    "saturation_high": "Clipped share, high",
    "overflow": "p99.99 over range",
    "under_use": "Range over p99.99",
    "wasserstein_steps": "Wasserstein-1, steps",
    "absmax_ratio": "Largest value, ratio",
}


def sqnr_of(metrics: dict[str, float]) -> float | None:
    """SQNR in dB, derived from the relative L2 error when it is not there itself; None without either."""
    if "sqnr_db" in metrics:
        return metrics["sqnr_db"]
    rel_l2 = metrics.get("rel_l2")
    if rel_l2 is None:
        return None
    if rel_l2 == 0:
        return math.inf
    # NaN falls through to NaN; an infinite relative error is a ratio of minus infinity dB.
    return math.nan if math.isnan(rel_l2) else (-math.inf if math.isinf(rel_l2) else -20 * math.log10(rel_l2))


def is_broken(metrics: dict[str, float]) -> bool:
    """Whether values that should be finite are not."""
    sqnr_db = sqnr_of(metrics)
    lost = sqnr_db is not None and (math.isnan(sqnr_db) or sqnr_db == -math.inf)
    nonfinite = metrics.get("nonfinite", 0.0)
    return lost or not nonfinite <= 0


def duration(seconds: float) -> str:
    """Seconds for people."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def memory(megabytes: float) -> str:
    """Megabytes for people."""
    if not math.isfinite(megabytes):
        return "unknown"
    return f"{megabytes / 1024:.1f} GB" if megabytes >= 1024 else f"{megabytes:.0f} MB"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 layer`, `2 layers`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def position(batch: int, index: list[int]) -> str:
    """A batch and an element in it."""
    element = f", element [{', '.join(map(str, index))}]" if index else ""
    return f"batch {batch}{element}"
