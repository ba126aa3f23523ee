"""Rules on where quantizers stand: beside which operators, behind one another, on which paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from diag.lint.hazard import QDQ, Hazard, hazards
from diag.model.graph import LINEAR_OPS, Model
from diag.plan.layers import index_layers
from diag.typed.brought import DEQUANTIZE, QUANTIZE, Quantizer, quantizer_of, same_steps

_IN_ONE_KERNEL = frozenset({"Add", "BatchNormalization", "Relu", "Identity"})
"""What may stand between a linear layer and the residual Add that its kernel takes in."""


def check_placement(
    model: Model, quantizers: Sequence[Quantizer], floats: frozenset[str]
) -> Iterator[Hazard]:
    """Hazards of how quantizers stand to layers and to one another; `floats` are floating-point tensors."""
    by_output = {q.output: q for q in quantizers}
    yield from _one_sided(model, by_output)
    yield from _half_quantized(model, by_output)
    yield from _concats(model, by_output)
    yield from _double(model, quantizers, by_output)
    yield from _index_paths(model, floats)


def _one_sided(model: Model, by_output: Mapping[str, Quantizer]) -> Iterator[Hazard]:
    """Adds with one quantized input, where the other does not come straight out of a quantized layer.

    A linear layer's kernel takes in the residual Add behind it: then only the other branch has a quantizer.
    """
    found = []
    for layer in model.layers:
        names = [name for name in layer.inputs if name in model.value_dependent]
        if layer.op_type != "Add" or len(names) != 2 or names[0] == names[1]:
            continue
        given = [quantizer_of(model, by_output, name) is not None for name in names]
        if sum(given) == 1 and not _out_of_a_kernel(model, by_output, names[given.index(False)]):
            found.append(layer.id)
    yield from hazards(
        ("one-sided-add", QDQ, "warning"),
        found,
        f"{len(found)} Adds have a quantizer on one input only, so the Add runs in float and costs reformats "
        f"(speed, not accuracy), first {found[0] if found else ''}",
        "Quantize the residual branch with the same scale, or neither.",
    )


def _out_of_a_kernel(model: Model, by_output: Mapping[str, Quantizer], name: str) -> bool:
    layer = model.producers.get(name)
    while layer is not None and len(model.consumers.get(layer.outputs[0], ())) == 1:
        if layer.op_type in LINEAR_OPS:
            return all(quantizer_of(model, by_output, operand) is not None for operand in layer.inputs[:2])
        data = [operand for operand in layer.inputs if operand in model.value_dependent]
        if layer.op_type not in _IN_ONE_KERNEL or len(data) != 1:
            return False
        layer = model.producers.get(data[0])
    return False


def _half_quantized(model: Model, by_output: Mapping[str, Quantizer]) -> Iterator[Hazard]:
    """Linear layers with a quantized activation and another operand in float; a weight alone is usual."""
    found = []
    for layer in model.layers:
        if layer.op_type not in LINEAR_OPS:
            continue
        operands = [quantizer_of(model, by_output, name) for name in layer.inputs[:2]]
        kinds = {q.kind for q in operands if q is not None}
        if "activation" in kinds and None in operands:
            found.append(layer.id)
    yield from hazards(
        ("half-quantized", QDQ, "warning"),
        found,
        f"{len(found)} layers have one operand quantized and the other not: they round and still run in "
        f"float, first {found[0] if found else ''}",
        "Quantize both operands, or none.",
    )


def _concats(model: Model, by_output: Mapping[str, Quantizer]) -> Iterator[Hazard]:
    found: list[tuple[str, float]] = []
    for layer in model.layers:
        if layer.op_type != "Concat" or len(set(layer.inputs)) < 2:
            continue
        given = [quantizer_of(model, by_output, name) for name in layer.inputs]
        scales = [float(q.scale.max()) for q in given if q is not None and q.scale is not None]
        if scales and len(scales) < len(given):
            found.append((layer.id, float("inf")))
        elif scales and max(scales) != min(scales):
            found.append((layer.id, max(scales) / min(scales) if min(scales) > 0 else float("inf")))
    worst = max((ratio for _, ratio in found), default=1.0)
    said = "one input is not quantized" if worst == float("inf") else f"up to {worst:.3g} times"
    yield from hazards(
        ("concat-scales", QDQ, "warning"),
        [name for name, _ in found],
        f"{len(found)} Concats join inputs of unequal scales ({said}), so they are quantized anew, first "
        f"{found[0][0] if found else ''}",
        "Give all inputs of a Concat one scale: the largest.",
        worst_ratio=worst,
    )


def _double(
    model: Model, quantizers: Sequence[Quantizer], by_output: Mapping[str, Quantizer]
) -> Iterator[Hazard]:
    found = []
    for quantizer in quantizers:
        if quantizer.kind == "stored":
            continue
        before = quantizer_of(model, by_output, quantizer.source)
        if before is not None and not same_steps(before, quantizer):
            found.append(quantizer.layer)
    yield from hazards(
        ("double-quantization", QDQ, "warning"),
        found,
        f"{len(found)} tensors are quantized twice with different steps, so they are rounded twice, first "
        f"{found[0] if found else ''}",
        "Take one of the two quantizers out.",
    )


def _index_paths(model: Model, floats: frozenset[str]) -> Iterator[Hazard]:
    index = index_layers(model, floats)
    found = [x.id for x in model.layers if x.id in index and x.op_type in (QUANTIZE, DEQUANTIZE)]
    yield from hazards(
        ("shape-path", QDQ, "error"),
        found,
        f"{len(found)} quantizers stand on shapes or indices, which must be exact, first "
        f"{found[0] if found else ''}",
        "Leave shape arithmetic out of quantization.",
    )
