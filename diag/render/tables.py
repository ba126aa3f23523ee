"""The report's tables as cells: outputs, layers, kernels, gate checks, pins, metrics."""

from __future__ import annotations

from collections.abc import Iterable

from diag.numerics.table import METRICS
from diag.render.cells import (
    MISSING,
    Cell,
    Column,
    Row,
    Table,
    better,
    heading,
    is_broken,
    metric_cell,
    metric_column,
    metric_text,
    position,
    sqnr_of,
)
from diag.report.schema import Check, LayerInfo, OutputInfo, Report, WorstCase

_NAME_HINT = "the ONNX node"


def outputs_table(report: Report) -> Table:
    """One row per output, two more where an engine ran; a column for every metric that any output has."""
    names = _metric_names(output.metrics for output in report.outputs)
    columns = (
        Column("Output"),
        *(metric_column(name) for name in names),
        Column("Worst case", hint="batch by its order in the data, and the element with the largest error"),
    )
    return Table(columns, tuple(row for output in report.outputs for row in _output_rows(output, names)))


def _metric_names(metrics: Iterable[dict[str, float]]) -> list[str]:
    """Names that occur, the known ones in the order of the table of metrics."""
    found = {name for item in metrics for name in item}
    return [name for name in METRICS if name in found] + sorted(found - METRICS.keys())


def _output_rows(output: OutputInfo, names: list[str]) -> list[Row]:
    worst = output.worst
    where = Cell(MISSING, None, "mute") if worst is None else Cell(position(worst.batch, worst.index))
    origin = output.layer and f"from {output.layer}"
    rows = [
        _output_row(
            output.name, f"emulation, {origin}" if output.engine else origin, output.metrics, names, where
        )
    ]
    nowhere = Cell(MISSING, None, "mute")
    for what, metrics in (
        ("engine", output.engine),
        ("engine against its emulation", output.engine_vs_emulation),
    ):
        if metrics:
            rows.append(_output_row(output.name, what, metrics, names, nowhere))
    return rows


def _output_row(name: str, what: str, metrics: dict[str, float], names: list[str], where: Cell) -> Row:
    cells = [metric_cell(metric, metrics.get(metric)) for metric in names]
    return Row((Cell(name, name, "name", sub=what), *cells, where), "born" if is_broken(metrics) else "")


def layers_table(report: Report) -> Table:
    """One row per layer, in graph order. What was not measured is a dash, never 0."""
    engine = any(layer.engine for layer in report.layers)
    notes = _birth_notes(report)
    rows = tuple(_layer_row(n, layer, notes, engine) for n, layer in enumerate(report.layers, start=1))
    return Table(_layer_columns(engine), rows)


def _layer_columns(engine: bool) -> tuple[Column, ...]:
    sqnr = [
        ("Accumulated", "SQNR with everything before it lowered too: where it hurts"),
        ("Local", "SQNR with the reference's inputs: who did it. A dash: computed as in the reference"),
    ]
    if engine:
        sqnr.append(("Engine", "SQNR of the built engine's tensor against the reference"))
    return (
        Column("#", kind="num", hint="place in graph order"),
        Column("Layer", hint=_NAME_HINT),
        Column("Role", filter=True),
        Column("Block", kind="num"),
        Column("Op", hint="ONNX operator"),
        Column("Format", filter=True),
        *(Column(title, "dB", "num", hint, worst_first="asc") for title, hint in sqnr),
        Column("Channel min", "dB", "num", METRICS["channel_min_sqnr_db"].meaning, worst_first="asc"),
        Column("Worst batch", kind="num", hint="the batch with the largest error, by its order in the data"),
        Column("Status", filter=True),
        Column("Notes"),
    )


def _layer_row(number: int, layer: LayerInfo, notes: dict[str, tuple[str, str]], engine: bool) -> Row:
    seen = layer.status == "compared"
    note, css = notes.get(layer.name) or notes.get(layer.id) or ("", "")
    errors = [layer.accumulated, layer.local, *([layer.engine] if engine else [])]
    cells = (
        Cell(str(number), number),
        Cell(layer.name, layer.name, "name", sub=layer.source),
        Cell(layer.role, layer.role),
        Cell(MISSING, None, "mute") if layer.block is None else Cell(str(layer.block), layer.block),
        Cell(layer.op_type, layer.op_type),
        Cell(layer.format, layer.format, sub=_built(layer)),
        *(metric_cell("sqnr_db", sqnr_of(metrics) if seen else None) for metrics in errors),
        _channel_cell(layer, seen),
        _batch_cell(layer.worst if seen else None),
        Cell(layer.status.replace("_", " "), layer.status, "" if seen else "mute"),
        _notes_cell(layer, note),
    )
    return Row(cells, css or ("born" if seen and is_broken(layer.accumulated) else ""), f"L{number}")


def _built(layer: LayerInfo) -> str:
    """What the engine made of the format; nothing where it did as asked, or is not known."""
    return "" if layer.built in ("", layer.format) else f"built: {layer.built}"


def _channel_cell(layer: LayerInfo, seen: bool) -> Cell:
    cell = metric_cell("channel_min_sqnr_db", layer.accumulated.get("channel_min_sqnr_db") if seen else None)
    channel = layer.worst.channel if layer.worst else None
    if cell.sort_key is None or channel is None or cell.hint:
        return cell
    return Cell(cell.text, cell.sort_key, cell.css, f"channel {channel}")


def _batch_cell(worst: WorstCase | None) -> Cell:
    if worst is None:
        return Cell(MISSING, None, "mute")
    return Cell(str(worst.batch), worst.batch, hint=f"element {worst.index}" if worst.index else "")


def _notes_cell(layer: LayerInfo, birth: str) -> Cell:
    parts = [birth, layer.reason]
    for name, words in (("nonfinite", "not finite"), ("zero_collapsed_rows", "rows zeroed")):
        value = layer.accumulated.get(name, 0.0) if layer.status == "compared" else 0.0
        if value:
            parts.append(f"{metric_text(name, value)} {words}")
    return Cell("; ".join(part for part in parts if part))


def _birth_notes(report: Report) -> dict[str, tuple[str, str]]:
    """Per layer: what the list of births says about it, and the row's class."""
    notes: dict[str, tuple[str, str]] = {}
    for number, birth in enumerate(report.births, start=1):
        for victim in birth.victims:
            notes.setdefault(victim, (f"behind {number}", "behind"))
    for number, birth in reversed(list(enumerate(report.births, start=1))):
        notes[birth.layer] = (f"error begins here ({number})", "born")
    return notes


def kernels_table(report: Report) -> Table | None:
    """The engine's kernels, or None when there are none."""
    if not report.kernels:
        return None
    columns = (
        Column("Kernel", hint="one unit of execution in the engine"),
        Column("Layers", hint="ONNX nodes that were fused into it"),
        Column("Inputs"),
        Column("Outputs"),
        Column("Accumulator"),
        Column("Tactic"),
        Column("Time", "ms", "num", worst_first="desc"),
    )
    rows = tuple(
        Row(
            (
                Cell(kernel.name, css="name"),
                Cell(", ".join(kernel.layers) or MISSING, css="name"),
                *(
                    Cell(text or MISSING)
                    for text in (
                        ", ".join(kernel.input_types),
                        ", ".join(kernel.output_types),
                        kernel.accumulator,
                        kernel.tactic,
                    )
                ),
                metric_cell("time_ms", kernel.time_ms),
            )
        )
        for kernel in report.kernels
    )
    return Table(columns, rows)


def checks_table(report: Report) -> Table | None:
    """The gate's checks, or None without a gate."""
    if report.gate is None:
        return None
    columns = (Column("Check"), Column("Value", kind="num"), Column("Bound", kind="num"), Column("Result"))
    return Table(columns, tuple(_check_row(check) for check in report.gate.checks))


def _check_row(check: Check) -> Row:
    value = Cell(MISSING, None, "mute") if check.value is None else metric_cell("", check.value)
    # The metric is not a field of a check, so the numbers are shown as they are.
    shown = value if check.value is None else Cell(f"{check.value:.6g}", check.value, value.css)
    result = Cell("passed" if check.passed else "failed", css="ok" if check.passed else "bad")
    return Row((Cell(check.name, css="name"), shown, Cell(f"{check.bound:.6g}", check.bound), result))


def pins_table(report: Report) -> Table | None:
    """The plan's pins, or None when it has none."""
    if report.plan is None or not report.plan.pins:
        return None
    columns = (Column("Pin"), Column("Format"), Column("Layers", kind="num"), Column("Reason"))
    rows = tuple(
        Row(
            (
                Cell(pin.target, css="name"),
                Cell(pin.format),
                Cell(f"{pin.layers:,}", pin.layers),
                Cell(pin.reason),
            )
        )
        for pin in report.plan.pins
    )
    return Table(columns, rows)


def glossary_table() -> Table:
    """Every metric: its heading, name, unit, direction, meaning."""
    words: dict[str, str] = {"higher": "higher", "lower": "lower", "zero": "near zero", "none": MISSING}
    columns = (Column("Metric"), Column("Name in files"), Column("Unit"), Column("Better"), Column("Meaning"))
    rows = tuple(
        Row(
            (
                Cell(heading(row.name)),
                Cell(row.name, css="name"),
                Cell(row.unit or MISSING),
                Cell(words[better(row.name)]),
                Cell(row.meaning),
            )
        )
        for row in METRICS.values()
    )
    return Table(columns, rows)
