"""The terminal summary of a drift report, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diag.render.cells import count
from diag.render.drift_groups import WORDS, percent
from diag.render.drift_view import ranked
from diag.render.text import clean, cut
from diag.render.view import headline
from diag.report.drift import Drift, DriftDay, DriftSlice
from diag.report.schema import Report

MAX_TENSORS, MAX_GROUPS = 6, 8
_TONES = {"ok": "green", "warn": "yellow", "bad": "red", "plain": "default"}
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def drift_summary(report: Report, width: int = 100, files: Sequence[str] = ()) -> RenderableType:
    """The summary for a terminal of `width` columns; `files` are the paths that were written."""
    drift = report.drift
    assert drift is not None
    lead = headline(report)
    first = Text(lead.label.upper(), style=f"bold {_TONES[lead.tone]}").append(
        f"  {clean(lead.sentence)}", "none"
    )
    sides = f"{drift.calibration}; {count(drift.production_requests, 'request')} in {drift.production}"
    parts: list[RenderableType] = [
        first,
        Text(cut(sides, 2 * width), style="dim"),
        "",
        _tensors(drift, width),
    ]
    parts += _groups(drift, width)
    if drift.costs_sentence:
        parts += ["", Text(clean(drift.costs_sentence))]
    parts.append("")
    for advice in drift.advice:
        gain = "" if advice.gain_db is None else f" ({advice.gain_db:+.1f} dB in the worst tensor)"
        parts.append(Text(f"Do: {clean(advice.text)}{gain}"))
        if advice.command and advice.action != "nothing":
            parts.append(Text(f"    {clean(advice.command)}", style="dim"))
    if files:
        parts.append(Text(f"Files: {'  '.join(map(clean, files))}"))
    return Group(*parts)


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False, title_justify="left")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _tensors(drift: Drift, width: int) -> RenderableType:
    table = _table("Tensor", "Verdict", "Loss, dB", "Clipped, %", "p99.99/range", "W1")
    shown = ranked(drift)[:MAX_TENSORS]
    names = _short_names([tensor.tensor for tensor in shown])
    for tensor, name in zip(shown, names, strict=True):
        figures = tensor.figures
        table.add_row(
            Text(cut(name, max(width - 57, 20))),
            Text(WORDS[tensor.level], style=_STYLES[tensor.level]),
            f"{figures['sqnr_loss_db'].value + 0.0:.1f}",
            percent(figures["saturation"].value),
            f"{figures['overflow'].value:.2f}",
            f"{figures['wasserstein_steps'].value:.2f}",
        )
    return table


def _short_names(names: Sequence[str]) -> list[str]:
    """Names without the beginning that all share, and without the ending that exporters add."""
    parts = [name.removesuffix("_output_0").split("/") for name in names]
    shared = 0
    while (
        len(parts) > 1 and len({tuple(p[: shared + 1]) for p in parts}) == 1 < min(map(len, parts)) - shared
    ):
        shared += 1
    return ["/".join(part[shared:]) for part in parts]


def _groups(drift: Drift, width: int) -> list[RenderableType]:
    """Slices, then dates: the last ones, where there are many."""
    named: list[tuple[str, Sequence[tuple[str, DriftSlice | DriftDay]]]] = [
        ("Slice", [(s.name, s) for s in drift.slices][:MAX_GROUPS]),
        ("Date", [(d.date, d) for d in drift.timeline][-MAX_GROUPS:]),
    ]
    parts: list[RenderableType] = []
    for title, groups in named:
        if not groups:
            continue
        table = _table(title, "Verdict", "Requests", "Drifting", "Worst loss, dB", "Most clipped, %")
        for name, group in groups:
            word = WORDS[group.level] if group.judged else "too few requests"
            table.add_row(
                Text(cut(name, max(width - 70, 16))),
                Text(word, style=_STYLES[group.level] if group.judged else "dim"),
                f"{group.requests:,}",
                str(group.drifting),
                f"{group.worst_sqnr_loss_db + 0.0:.1f}",
                percent(group.worst_saturation),
            )
        parts += ["", table]
    return parts
