"""Measures what pinned layers read and write in FP32, and names the hazard in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from diag.calibration.extremes import measure_extremes
from diag.engines.watch import Array, Watcher
from diag.lint.constants import check_constants
from diag.lint.guards import check_guards
from diag.lint.hazard import lint_rules, worst_first
from diag.lint.lowered import Extremes, Lowered
from diag.lint.operands import weight_sqnr_db
from diag.lint.ranges import check_ranges
from diag.lint.walks import overflow_kind
from diag.model.graph import MATRIX_OPS, Layer, Model
from diag.numerics.formats import BLOCK_FORMATS, FORMATS
from diag.numerics.steps import StepSums
from diag.pipeline.prepare import read_scales
from diag.pipeline.search.setup import Search
from diag.progress import Silent
from diag.search.rank import Candidate
from diag.search.reasons import Part, QuantizedOperand, Reason, quantized_reason
from diag.typed.operands import REARRANGES, Operand


def reasons(search: Search, pins: Sequence[Candidate]) -> dict[str, Reason | None]:
    """The hazard of each pin (by id), None where none was found, on the batches that chose.

    Pins out of a format with a scale for each block are not among them: nothing of theirs is measured here.

    The FP32 model runs once on each batch, with what the pinned layers read and write as its outputs.
    """
    formats = search.planned.resolved.formats
    quantized = [pin for pin in pins if FORMATS[formats[pin.id]].quantized]
    floats = [pin for pin in pins if pin not in quantized]
    quantized = [pin for pin in quantized if formats[pin.id] not in BLOCK_FORMATS]
    return {**_quantized(search, quantized), **_floats(search, floats)}


def _batches(search: Search) -> Iterable[Mapping[str, Array]]:
    """Those that pins are chosen on."""
    return (search.variants.batch(number) for number in search.chosen)


def _quantized(search: Search, pins: Sequence[Candidate]) -> dict[str, Reason | None]:
    planned = search.planned
    layers = frozenset().union(*(pin.layers for pin in pins))
    operands = [o for o in planned.operands if o.layer in layers]
    sums = _step_sums(search, operands)
    found: dict[str, list[QuantizedOperand]] = {}
    for operand in operands:
        known = _operand(search, operand, sums)
        if known is not None:
            found.setdefault(operand.layer, []).append(known)
    return {pin.id: quantized_reason([o for n in pin.layers for o in found.get(n, [])]) for pin in pins}


def _operand(
    search: Search, operand: Operand, sums: Mapping[tuple[str, str, int], StepSums]
) -> QuantizedOperand | None:
    key = _key(search, operand)
    if operand.weight is not None:
        sqnr_db = weight_sqnr_db(operand, key[1])
        return None if sqnr_db is None else QuantizedOperand(operand.tensor, "weight", sqnr_db)
    part: Part = "probabilities" if _is_softmax(search.planned.model, operand.tensor) else "input"
    return QuantizedOperand.of(operand.tensor, part, sums[key]) if key in sums else None


def _key(search: Search, operand: Operand) -> tuple[str, str, int]:
    """Tensor, format and channel axis of an operand."""
    planned, layer = search.planned, operand.layer
    keys = planned.roles[layer].name == "qk_matmul"
    axis = _axis(planned.model.layer_by_id[layer], operand, keys)
    return operand.tensor, planned.resolved.formats[layer], axis


def _step_sums(search: Search, operands: Sequence[Operand]) -> dict[tuple[str, str, int], StepSums]:
    """Sums of every activation among the operands, by tensor, format and channel axis."""
    planned, sums = search.planned, dict[tuple[str, str, int], StepSums]()
    table = read_scales(planned, search.table or None)
    keys = {_key(search, operand) for operand in operands if operand.weight is None}
    if table is not None:
        scales = {fmt: table.scales(fmt, planned.method) for _, fmt, _ in keys}
        sums = {key: StepSums(scales[key[1]][key[0]], key[1]) for key in sorted(keys)}
    if sums:
        watcher = Watcher(planned.model, [tensor for tensor, _, _ in sums])
        for batch in _batches(search):
            seen = watcher.run(batch)
            for (tensor, _, axis), one in sums.items():
                one.update(np.asarray(seen[tensor], np.float32), axis)
    return sums


def _axis(layer: Layer, operand: Operand, keys: bool) -> int:
    """Axis of the channels; `keys`: of QK, whose second operand has them before the last."""
    if layer.op_type not in MATRIX_OPS:
        return 1
    return -2 if operand.input == 1 and keys else -1


def _is_softmax(model: Model, tensor: str) -> bool:
    """Whether a Softmax wrote the tensor."""
    writer = model.producers.get(tensor)
    while writer is not None and writer.op_type in REARRANGES:
        writer = model.producers.get(writer.inputs[0])
    return writer is not None and writer.op_type == "Softmax"


def _floats(search: Search, pins: Sequence[Candidate]) -> dict[str, Reason | None]:
    if not pins:
        return {}
    model = search.planned.model
    layers = [layer for layer in model.layers if any(layer.id in pin.layers for pin in pins)]
    names = dict.fromkeys(name for layer in layers for name in (*layer.inputs, *layer.outputs))
    types = search.planned.types
    wanted = [n for n in names if n in model.value_dependent and n in types and types[n].is_float]
    measured = measure_extremes(model, wanted, _batches(search), lint_rules().mask_magnitude, Silent())
    return {pin.id: _float_reason(search, pin, measured) for pin in pins}


def _float_reason(search: Search, pin: Candidate, measured: Mapping[str, Extremes]) -> Reason | None:
    """What the rules of `check` say of the pinned layers alone, and what these layers read from others."""
    planned = search.planned
    lowered = Lowered(planned.model, {n: planned.resolved.formats[n] for n in pin.layers})
    roles = {name: role.name for name, role in planned.roles.items()}
    found = worst_first(
        [  # causes before what comes of them
            *check_guards(lowered, measured),
            *check_ranges(lowered, roles, measured),
            *check_constants(lowered, planned.plan.constants.out_of_range),
        ]
    )
    said = [Reason(h.kind, h.title) for h in found if h.severity == "error"]
    said += _reads(lowered, roles, measured)
    near = [h for h in found if h.severity == "warning" and h.id.endswith("-near")]
    said += [Reason(h.kind, h.title) for h in found if h.severity == "warning" and h not in near]
    return next(iter(said), None)


def _reads(lowered: Lowered, roles: Mapping[str, str], measured: Mapping[str, Extremes]) -> list[Reason]:
    """Values from other layers that the format cannot hold: too large, or denormal throughout."""
    found = []
    for layer in lowered.layers:
        fmt = lowered.format_of(layer)
        smallest = float(ml_dtypes.finfo(fmt.dtype).smallest_normal)  # type: ignore[no-untyped-call]
        for name in (n for n in layer.inputs if n in measured):
            absmax, named = measured[name].absmax, fmt.name.upper()
            if absmax > fmt.max:
                text = f"it reads {name}, which reaches {absmax:.4g}, beyond {named}'s {fmt.max:.5g}"
                found.append(Reason(overflow_kind(roles[layer.id], layer.op_type), text))
            elif 0 < absmax < smallest:
                text = f"it reads {name}, which is denormal throughout in {named} (up to {absmax:.3g})"
                found.append(Reason("sensitive-op", text))
    return found
