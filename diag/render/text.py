"""The terminal summary: what a reader needs after a run, on one screen."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from diag.numerics.table import METRICS
from diag.render.cards import change
from diag.render.cells import (
    MISSING,
    better,
    count,
    duration,
    heading,
    is_broken,
    metric_text,
    sqnr_of,
)
from diag.render.view import Headline, headline, model_name, plan_text, warnings
from diag.report.schema import LayerInfo, Report

MAX_OUTPUTS, MAX_LAYERS, MAX_BIRTHS, MAX_METRICS = 3, 5, 2, 4
_MAIN_METRICS = ("sqnr_db", "cosine", "top1", "kl", "rel_l2", "max_abs", "nonfinite")
_STYLES = {"ok": "bold green", "bad": "bold red", "warn": "bold yellow", "plain": "bold"}

# Names come from models: control characters in them must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def summary(report: Report, console_width: int = 100, files: Sequence[str] = ()) -> RenderableType:
    """The summary for a terminal of `console_width` columns; `files` are the paths that were written."""
    parts: list[RenderableType] = [*_verdict(report, console_width), _ran(report, console_width)]
    for section in (_outputs, _worst_layers, _begins):
        parts += ["", *section(report, console_width)]
    parts += [Text(f"Next: {step}") for step in next_steps(report, files)]
    if files:
        parts.append(_line(f"Files: {'  '.join(files)}", console_width * 2))
    return Group(*parts)


def plain(report: Report, files: Sequence[str] = ()) -> str:
    """The summary as text without colour, 100 columns wide."""
    stream = StringIO()
    Console(file=stream, width=100, color_system=None, highlight=False).print(summary(report, 100, files))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def clean(text: str) -> str:
    """`text` without control characters, which a terminal would obey."""
    return _CONTROL.sub("�", text)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters; the middle is left out, since both ends of a name tell."""
    text = clean(text)
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _line(text: str, width: int) -> Text:
    """One line of text; cut at its end when it is too long."""
    text = clean(text)
    return Text(text if len(text) <= width else f"{text[: width - 1]}…")


def _verdict(report: Report, width: int) -> list[Text]:
    lead: Headline = headline(report)
    first = Text()
    first.append(lead.label.upper(), style=_STYLES[lead.tone])
    # Two lines at most: the sentence is the report's, and may be long.
    first.append(f"  {_line(lead.sentence, 2 * width - len(lead.label) - 12)}")
    lines = [first]
    lines += [_line(text, width) for text in _missed(report)]
    for warning in warnings(report)[:2]:
        text = _line(f"  Mind: {warning}", width)
        text.stylize("yellow")
        lines.append(text)
    return lines


def _missed(report: Report) -> list[str]:
    """The first two checks that failed, and how many more."""
    failed = [check for check in report.gate.checks if not check.passed] if report.gate else []
    lines = [
        f"  missed: {check.name}" + ("" if check.value is None else f", it is {check.value:.5g}")
        for check in failed[:2]
    ]
    if len(failed) > 2:
        lines[-1] += f"; and {count(len(failed) - 2, 'more check')} missed"
    return lines


def _ran(report: Report, width: int) -> Text:
    run = report.run
    text = (
        f"{model_name(report)}; {plan_text(report)}; {run.engine}, {duration(run.seconds)}; "
        f"{count(run.samples, 'sample')} of {run.data or 'unnamed data'}"
    )
    line = _line(text, width)
    line.stylize("dim")
    return line


def _outputs(report: Report, width: int) -> list[RenderableType]:
    if not report.outputs:
        return []
    found = {name for output in report.outputs for name in output.metrics}
    names = [name for name in _MAIN_METRICS if name in found][:MAX_METRICS]
    if any(is_broken(output.metrics) for output in report.outputs) and "nonfinite" in found:
        names = [*(name for name in names[: MAX_METRICS - 1] if name != "nonfinite"), "nonfinite"]
    table = _table()
    table.add_column("Output", no_wrap=True)
    for name in names:
        unit = METRICS[name].unit
        table.add_column(f"{heading(name)}{f', {unit}' if unit in ('dB', 'nats') else ''}", justify="right")
    for output in report.outputs[:MAX_OUTPUTS]:
        values = [_metric(name, output.metrics.get(name)) for name in names]
        table.add_row(Text(cut(output.name, width - 14 * len(names) - 4)), *values)
    return [table, *_more(len(report.outputs) - MAX_OUTPUTS, "output", width)]


def _metric(name: str, value: float | None) -> Text:
    if value is None:
        return Text(MISSING, style="dim")
    bad = not math.isfinite(value) and not (value == math.inf and better(name) == "higher")
    return Text(metric_text(name, value), style="red" if bad else "")


def _more(number: int, noun: str, width: int) -> list[RenderableType]:
    return [_line(f"  and {count(number, f'more {noun}')} in the report", width)] if number > 0 else []


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False, title_justify="left")


def worst_layers(report: Report, number: int = MAX_LAYERS) -> list[LayerInfo]:
    """The layers that do the most damage: by local error where it was measured, else by accumulated error.

    A layer whose values are not finite comes first. Layers that were not observed cannot be ranked.
    """
    seen = [layer for layer in report.layers if layer.status == "compared"]
    local = [layer for layer in seen if sqnr_of(layer.local) is not None]
    ranked = [(_key(layer.local if local else layer.accumulated), layer) for layer in local or seen]
    return [layer for key, layer in sorted(ranked, key=lambda item: item[0]) if key < math.inf][:number]


def _key(metrics: dict[str, float]) -> float:
    sqnr_db = sqnr_of(metrics)
    if is_broken(metrics):
        return -math.inf
    return math.inf if sqnr_db is None else sqnr_db


def _worst_layers(report: Report, width: int) -> list[RenderableType]:
    layers = worst_layers(report)
    if not layers:
        return [_line("No layer could be compared.", width)]
    table = _table()
    table.add_column("Worst layers" + (" by local error" if layers[0].local else ""), no_wrap=True)
    table.add_column("Role, block", no_wrap=True)
    table.add_column("Format", no_wrap=True)
    table.add_column("Local, dB", justify="right", no_wrap=True)
    table.add_column("Accumulated, dB", justify="right", no_wrap=True)
    for layer in layers:
        values = [_metric("sqnr_db", sqnr_of(metrics)) for metrics in (layer.local, layer.accumulated)]
        table.add_row(
            Text(cut(layer.name, width - 56)), Text(cut(_part(layer), 18)), Text(layer.format), *values
        )
    return [table]


def _part(layer: LayerInfo) -> str:
    """Role and block, which tell more of a layer than its cut name."""
    return layer.role if layer.block is None else f"{layer.role} {layer.block}"


def _begins(report: Report, width: int) -> list[RenderableType]:
    if not report.births:
        return [_line("Begins: no layer turns good inputs into a bad output.", width)]
    # What reaches an output matters more than what heals.
    births = sorted(report.births, key=lambda birth: not birth.reaches_output)
    lines: list[RenderableType] = []
    for birth in births[:MAX_BIRTHS]:
        fate = f"{count(len(birth.victims), 'layer')} behind it" if birth.reaches_output else "heals"
        about = f": {change(birth)}, batch {birth.batch}, {fate}"
        lines.append(_line(f"Begins: {cut(birth.layer, max(20, width - len(about) - 8))}{about}", width))
    return [*lines, *_more(len(births) - MAX_BIRTHS, "place", width)]


def next_steps(report: Report, files: Sequence[str] = ()) -> list[str]:
    """What to do next, at most three lines; the commands are ready to paste."""
    finding = next((item for item in report.findings if item.responsible), None) or next(
        (item for item in report.findings if item.responsible is None and item.severity != "note"), None
    )
    steps = []
    if finding is not None:
        steps.append(f"{finding.title}." if not finding.title.endswith(".") else finding.title)
        steps += [step for step in (finding.mend.text, finding.mend.command) if step]
    elif report.run.random_data:
        steps.append("feed real data with --data FOLDER; random data proves little.")
    elif any(birth.reaches_output for birth in report.births):
        worst = next(birth for birth in report.births if birth.reaches_output)
        steps.append(f"pin {clean(worst.layer)} to a wider format in plan.yaml and compare again.")
    page = next((path for path in files if path.endswith(".html")), None)
    if not steps and page is not None:
        steps.append(f"open {shlex.quote(page)}")
    return steps[:3]
