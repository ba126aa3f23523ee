"""Rules on ranges: what leaves a float format, by values measured on the FP32 reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes

from diag.lint.hazard import Hazard, Severity, hazards, lint_rules
from diag.lint.lowered import Extremes, Lowered
from diag.lint.walks import MASKS, SQUARES, feeds_softmax, overflow_kind
from diag.model.graph import Layer, Model
from diag.roles.norms import is_square


def check_ranges(
    lowered: Lowered, roles: Mapping[str, str], measured: Mapping[str, Extremes]
) -> Iterator[Hazard]:
    """Layers whose output leaves, or nearly leaves, their format; and angles that it cannot tell apart."""
    found: dict[tuple[str, bool], list[tuple[Layer, float]]] = {}
    for layer in lowered.layers:
        extremes = [measured[name] for name in layer.outputs if name in measured]
        absmax = max((x.absmax for x in extremes), default=0.0)
        limit = lowered.format_of(layer).max
        if absmax * lint_rules().headroom_warning <= limit or _heals(lowered.model, layer):
            continue
        kind = overflow_kind(roles[layer.id], layer.op_type)
        if _is_mask(lowered.model, layer, extremes, limit):
            kind = "mask-constant"
        found.setdefault((kind, absmax > limit), []).append((layer, absmax))
    for (kind, over), layers in found.items():
        yield _overflow(lowered, kind, over, layers)
    yield from _vanished_squares(lowered, roles, measured)
    yield from _angles(lowered, measured)


def check_inputs(lowered: Lowered, measured: Mapping[str, Extremes]) -> Iterator[Hazard]:
    """Inputs of the model that a 16-bit reader cannot hold."""
    for name, info in lowered.model.inputs.items():
        readers = [x for x in lowered.model.consumers.get(name, ()) if x.id in lowered.floats]
        if not info.is_float or name not in measured or not readers:
            continue
        fmt = lowered.format_of(readers[0])
        mask = any(feeds_softmax(lowered.model, x, lint_rules().reach) for x in readers)
        absmax = max(measured[name].absmax, -measured[name].lowest if mask else 0.0)
        if absmax > fmt.max:
            title = f"input {name} holds {absmax:.4g}, beyond the {fmt.name.upper()} range of {fmt.max:g}"
            kind = "mask-constant" if mask else "activation-overflow"
            mend = "Use a mask value between -1e4 and -3e4." if mask else "Scale the input."
            yield Hazard(f"input-{kind}", kind, "error", (name,), title, mend, {"reference_absmax": absmax})


def check_unmeasured(lowered: Lowered, norms: Sequence[frozenset[str]]) -> Iterator[Hazard]:
    """What only data can judge in FP16: norms that are spelled out, exponentials without a shift."""
    in_fp16 = [layer for layer in lowered.layers if lowered.floats[layer.id] == "fp16"]
    parts = frozenset[str]().union(*(part for part in norms if len(part) > 1))
    squares = [x.id for x in in_fp16 if x.id in parts and x.op_type in SQUARES]
    yield from hazards(
        ("norm-spelled-out", "norm-square-overflow", "note"),
        squares,
        f"{len(squares)} layers square or sum squares inside norms, and overflow FP16 once values pass 255",
        "Give --data to measure it.",
    )
    exponentials = [x for x in in_fp16 if x.op_type == "Exp" and not _heals(lowered.model, x)]
    unshifted = [x.id for x in exponentials if not _is_shifted(lowered.model, x)]
    yield from hazards(
        ("exp-unshifted", "exp-log-domain", "note"),
        unshifted,
        f"{len(unshifted)} exponentials have no maximum subtracted: in FP16 they overflow beyond 11.09",
        "Give --data to measure it.",
    )


def _is_shifted(model: Model, layer: Layer) -> bool:
    """Whether the maximum is subtracted before an Exp."""
    before = model.producers.get(layer.inputs[0])
    if before is None or before.op_type != "Sub":
        return False
    subtracted = model.producers.get(before.inputs[1])
    return subtracted is not None and subtracted.op_type == "ReduceMax"


def _heals(model: Model, layer: Layer) -> bool:
    """Whether an Exp may overflow without harm: in 1 / (1 + exp(x)), and in tanh(log(1 + exp(x)))."""
    while layer.op_type in ("Exp", "Add", "Log"):
        readers = model.consumers.get(layer.outputs[0], ())
        if len(readers) != 1:
            return False
        reader = readers[0]
        if layer.op_type == "Log":
            return reader.op_type == "Tanh"
        if reader.op_type == "Reciprocal":
            return layer.op_type == "Add"
        if reader.op_type == "Div":
            return layer.op_type == "Add" and reader.inputs[1] == layer.outputs[0]
        layer = reader
    return False


def _is_mask(model: Model, layer: Layer, extremes: list[Extremes], limit: float) -> bool:
    """Whether only the negative side overflows, on the way to a Softmax."""
    one_sided = all(x.maximum <= limit for x in extremes)
    return one_sided and layer.op_type in MASKS and feeds_softmax(model, layer, lint_rules().reach)


def _overflow(lowered: Lowered, kind: str, over: bool, layers: list[tuple[Layer, float]]) -> Hazard:
    first, _ = layers[0]
    fmt = lowered.format_of(first)
    absmax = max(value for _, value in layers)
    severity: Severity = "error" if over and kind != "mask-constant" else "warning"
    what = "the square inside a norm" if kind == "norm-square-overflow" else first.op_type
    how = "leaves" if over else "comes close to the end of"
    more = f" and {len(layers) - 1} more like it" if len(layers) > 1 else ""
    names = tuple(layer.id for layer, _ in layers)
    return Hazard(
        f"{kind}-{'measured' if over else 'near'}",
        kind,
        severity,
        names,
        f"{what} {how} the {fmt.name.upper()} range at {first.id}{more} ({absmax:.4g} of {fmt.max:.5g})",
        "Keep these layers in FP32 or BF16."
        if over
        else "Other data may take them beyond it: keep an eye on them.",
        {
            "layers": len(layers),
            "reference_absmax": absmax,
            "format_max": fmt.max,
            "headroom": fmt.max / absmax,
        },
        _with_readers(lowered, layers) if over else (),
    )


def _with_readers(lowered: Lowered, layers: list[tuple[Layer, float]]) -> tuple[str, ...]:
    """The layers and those that read their outputs: a value that was cast back to be read is lost again."""
    readers = (r for x, _ in layers for name in x.outputs for r in lowered.model.consumers.get(name, ()))
    names = [*(layer.id for layer, _ in layers), *(r.id for r in readers if r.id in lowered.floats)]
    return tuple(dict.fromkeys(names))


def _vanished_squares(
    lowered: Lowered, roles: Mapping[str, str], measured: Mapping[str, Extremes]
) -> Iterator[Hazard]:
    """Squares inside norms that are denormal throughout: the norm loses digits, or divides by 0."""
    found = {}
    for layer in lowered.layers:
        absmax = max((measured[n].absmax for n in layer.outputs if n in measured), default=0.0)
        info = ml_dtypes.finfo(lowered.format_of(layer).dtype)  # type: ignore[no-untyped-call]
        in_norm = roles[layer.id] == "norm" and is_square(lowered.model, layer)
        if in_norm and 0 < absmax < float(info.smallest_normal):
            found[layer.id] = absmax
    first = next(iter(found), "")
    yield from hazards(
        ("norm-square-underflow", "norm-square-overflow", "warning"),
        list(found),
        f"{len(found)} squares inside norms are denormal throughout, first {first} "
        f"(up to {found.get(first, 0.0):.3g})",
        "Scale the input of the norm up, or keep the square and the mean in FP32.",
    )


def _angles(lowered: Lowered, measured: Mapping[str, Extremes]) -> Iterator[Hazard]:
    found = []
    for layer in lowered.layers:
        if layer.op_type in ("Sin", "Cos") and layer.inputs[0] in measured:
            off = measured[layer.inputs[0]].absmax * lowered.format_of(layer).unit_roundoff
            if off > lint_rules().angle_error:
                found.append((layer.id, off))
    if found:
        worst = max(off for _, off in found)
        names = tuple(name for name, _ in found)
        title = f"{len(found)} sines and cosines take angles off by up to {worst:.2g} rad, first {names[0]}"
        mend = "Keep the angles and these layers in FP32."
        yield Hazard(
            "position-precision",
            "position-precision",
            "warning",
            names,
            title,
            mend,
            {"angle_error": worst},
            names,
        )
