"""What a build did with a plan, as findings of the report: asked against built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from diag.kernels.audit import AuditFact, Kind, Request
from diag.kernels.kernel import Kernel
from diag.kernels.nodes import MULTIPLYING_OPS, NodeMap, built_types, map_nodes
from diag.kernels.verbose_log import warns_of_fp16_norms
from diag.model.graph import FLOAT_TYPES, Model, TensorInfo
from diag.numerics.formats import FORMATS
from diag.pipeline.prepare import Planned
from diag.report.schema import Check, Finding, GateResult, Mend, PinInfo
from diag.roles import norm_parts
from diag.typed.operands import brings_quantizers

FINDING_KINDS: Mapping[Kind, str] = {
    "format-absent": "precision-not-built",
    "not-lowered": "precision-not-built",
    "lowered": "precision-not-built",
    "pin-swallowed": "pin-not-honoured",
    "pin-spread": "pin-not-honoured",
    "pin-hidden": "pin-not-honoured",
    "fp16-accumulation": "reduction-accumulation",
    "norm-in-fp16": "norm-square-overflow",
    "tf32": "tf32-default",
    "reformats": "qdq-structure",
    "folded": "precision-not-built",
}
"""The report's name of the fault that each fact of an audit is evidence of."""

_MENDS: Mapping[Kind, str] = {
    "format-absent": "Build strongly typed from the plan (trtdiag build without --weak): a builder that may "
    "choose chooses by speed alone. Check that the plan's model was the one that was built.",
    "not-lowered": "TensorRT may have no such kernel for the operator: then leave it out of the plan. "
    "Or a neighbour forces its type: a one-sided Q/DQ pair, a pin, a branch.",
    "lowered": "Pin these layers, and build strongly typed, where the model's types bind the builder.",
    "pin-swallowed": "Pin every layer that shares the kernel, or build strongly typed.",
    "pin-spread": "Pin fewer layers of the group, or accept what the pin costs in time.",
    "pin-hidden": "Only a kernel's borders show types: compare outputs with and without the pin.",
    "fp16-accumulation": "Long sums lose small terms in FP16. Try these layers in BF16 or FP32; from "
    "TensorRT 11.3, casts to FP32 around attention give it FP32 accumulation.",
    "norm-in-fp16": "The square inside a norm leaves FP16's range silently: pin the norms to FP32.",
    "tf32": "FP32 was multiplied with 10 bits of mantissa: build with --no-tf32 to know what that costs.",
    "reformats": "Each change of type or layout costs a pass over memory: look at pins that stand alone.",
    "folded": "These layers were computed at build time, merged or removed: their type cannot be verified.",
}

_UNMET = frozenset({"format-absent", "not-lowered", "lowered", "pin-swallowed", "pin-spread"})
_SHOWN_NODES = 3


def request_for_plan(planned: Planned, formats: Mapping[str, str], log: Path | None = None) -> Request:
    """What a plan asks of a build: of the layers that multiply, and of those that a pin names.

    `formats` are those that the rewrite could apply (`TypedModel.formats`).
    """
    pinned = {layer for pin in planned.resolved.pins for layer in pin.layers}
    op_types = op_types_of(planned.model)
    asked = {
        layer: formats.get(layer, fmt)
        for layer, fmt in planned.resolved.formats.items()
        if _decides(planned.model, layer) and (op_types[layer] in MULTIPLYING_OPS or layer in pinned)
    }
    return Request(
        asked,
        op_types,
        pinned=pinned & asked.keys(),
        norms=norms_of(planned.model),
        fp16_norm_warning=parser_warned(log),
    )


def applicable_formats(planned: Planned) -> dict[str, str]:
    """Format of each layer as the rewrite would apply it, which needs no scales to be known."""
    model, formats = planned.model, planned.resolved.formats
    quantized = {operand.layer for operand in planned.operands}
    quantized |= {layer.id for layer in model.layers if brings_quantizers(model, layer)}
    return {
        layer: planned.plan.base if FORMATS[fmt].quantized and layer not in quantized else fmt
        for layer, fmt in formats.items()
    }


def request_for_model(model: Model, types: Mapping[str, TensorInfo], log: Path | None = None) -> Request:
    """What a model that is built as it is asks for: the one float type that all of a layer's tensors have."""
    asked = {
        layer.id: fmt
        for layer in model.layers
        if layer.op_type in MULTIPLYING_OPS
        and _decides(model, layer.id)
        and not _fed_by_quantizers(model, layer.id)
        and (fmt := _only_type(types, (*layer.reads, *layer.outputs)))
    }
    return Request(asked, op_types_of(model), norms=norms_of(model), fp16_norm_warning=parser_warned(log))


def request_unasked(model: Model, log: Path | None = None) -> Request:
    """Of an engine whose plan is not known nothing is asked; its layers are known all the same."""
    layers = {
        layer: "" for layer in data_layers(model) if model.layer_by_id[layer].op_type in MULTIPLYING_OPS
    }
    return Request(layers, op_types_of(model), norms=norms_of(model), fp16_norm_warning=parser_warned(log))


def types_of(node_map: NodeMap, request: Request) -> dict[str, str]:
    """Type in which each mapped node was built.

    A layer that does not multiply has its request's type where its kernel shows that type at all: a kernel
    that begins in FP32 and ends with a cast to FP16 computes in FP32.
    """
    types = built_types(node_map, request.op_types)
    for node in types:
        asked, op_type = request.asked(node), request.op_types.get(node, "")
        kernel = node_map.main(node, op_type)
        if asked and op_type not in MULTIPLYING_OPS and kernel is not None and asked in kernel.dtypes:
            types[node] = asked
    return types


def built_layers(model: Model, kernels: Sequence[Kernel], request: Request) -> dict[str, str]:
    """Type in which each layer that depends on the data was built, `folded` where no kernel names it."""
    node_map = map_nodes(kernels, data_layers(model))
    types = types_of(node_map, request)
    return {layer: types.get(layer, "") for layer in node_map.kernels_of} | dict.fromkeys(
        node_map.folded, "folded"
    )


def built_counts(kernels: Sequence[Kernel], request: Request) -> dict[str, dict[str, int]]:
    """Layers by the format asked for, and in which types they were built (`folded` where no kernel is)."""
    types = types_of(map_nodes(kernels, request.formats), request)
    counts: dict[str, Counter[str]] = {}
    for node, asked in request.formats.items():
        if asked:
            counts.setdefault(asked, Counter())[types.get(node, "folded") or "unknown"] += 1
    return {asked: dict(found) for asked, found in counts.items()}


def op_types_of(model: Model) -> dict[str, str]:
    """Operator of each layer."""
    return {layer.id: layer.op_type for layer in model.layers}


def norms_of(model: Model) -> tuple[str, ...]:
    """Layers that are norms, or parts of one, in graph order."""
    norms = {layer for parts in norm_parts(model) for layer in parts}
    return tuple(layer.id for layer in model.layers if layer.id in norms)


def data_layers(model: Model) -> list[str]:
    """Layers whose outputs depend on the data: those that an engine has to run."""
    return [layer.id for layer in model.layers if _decides(model, layer.id)]


def parser_warned(log: Path | None) -> bool:
    """Whether TensorRT's parser warned of norms in FP16, if there is a log to ask."""
    if log is None or not log.is_file():
        return False
    with log.open(encoding="utf-8", errors="replace") as lines:
        return warns_of_fp16_norms(lines)


def _decides(model: Model, layer: str) -> bool:
    return not model.value_dependent.isdisjoint(model.layer_by_id[layer].outputs)


def _fed_by_quantizers(model: Model, layer: str) -> bool:
    producers = (model.producers.get(name) for name in model.layer_by_id[layer].reads)
    return any(p is not None and p.op_type == "DequantizeLinear" for p in producers)


_FORMATS = {1: "fp32", 10: "fp16", 16: "bf16"}  # by ONNX element type


def _only_type(types: Mapping[str, TensorInfo], names: Iterable[str]) -> str:
    found = {types[name].elem_type for name in names if name in types} & FLOAT_TYPES
    return _FORMATS.get(found.pop(), "") if len(found) == 1 else ""


def findings_of(facts: Sequence[AuditFact]) -> list[Finding]:
    """One finding for each kind of fact and pair of types, the worst first, many nodes in one."""
    groups: dict[tuple[Kind, str, str], list[AuditFact]] = {}
    for fact in facts:
        groups.setdefault((fact.kind, fact.asked, fact.built), []).append(fact)
    return [_finding(kind, members) for (kind, _, _), members in groups.items()]


def _finding(kind: Kind, facts: Sequence[AuditFact]) -> Finding:
    first = facts[0]
    nodes = list(dict.fromkeys(node for fact in facts for node in fact.nodes))
    kernels = {kernel for fact in facts for kernel in fact.kernels}
    evidence: dict[str, float | str | bool] = {"fact": kind, "layers": len(nodes), "kernels": len(kernels)}
    evidence |= {name: value for name, value in (("asked", first.asked), ("built", first.built)) if value}
    times = [fact.time_ms for fact in facts if fact.time_ms is not None]
    if times:
        evidence["time_ms"] = sum(times)
    return Finding(
        id="-".join(filter(None, (kind, first.asked, first.built))),
        kind=FINDING_KINDS[kind],
        severity=first.severity,
        layers=nodes,
        title=first.text if len(facts) == 1 else _together(facts, nodes),
        evidence=evidence,
        mend=Mend(text=_MENDS[kind], pins=_pins(kind, nodes)),
    )


def _together(facts: Sequence[AuditFact], nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:_SHOWN_NODES])
    more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    first = facts[0]
    said: Mapping[str, str] = {
        "pin-swallowed": f"are pinned to {first.asked} and were built in {first.built}",
        "lowered": f"were to stay in {first.asked} and were built in {first.built}",
        "pin-spread": f"were asked in {first.asked} and share kernels with a pin: built in {first.built}",
        "not-lowered": f"were asked in {first.asked} and were built in {first.built}",
        "pin-hidden": f"are pinned to {first.asked}, inside kernels that write {first.built}: not visible",
    }
    return f"{len(nodes)} layers {said.get(first.kind, first.text)}: {shown}{more}"


def _pins(kind: Kind, nodes: Sequence[str]) -> list[PinInfo]:
    """Pins that would mend it, where pins can."""
    if kind != "norm-in-fp16":
        return []
    return [
        PinInfo(target=node, format="fp32", reason="norm built in FP16 alone", layers=1) for node in nodes
    ]


def is_unmet(fact: AuditFact) -> bool:
    """Whether the fact says that a request was not honoured."""
    return fact.kind in _UNMET


def strict_gate(findings: Sequence[Finding]) -> GateResult:
    """What `--strict` holds a build against: every request honoured, and no other warning."""
    unmet = sum(f.evidence.get("fact") in _UNMET for f in findings)
    warned = sum(f.severity != "note" and f.evidence.get("fact") not in _UNMET for f in findings)
    checks = [
        Check(name="requests not honoured", value=float(unmet), bound=0.0, passed=unmet == 0),
        Check(name="other errors and warnings", value=float(warned), bound=0.0, passed=warned == 0),
    ]
    return GateResult(passed=unmet + warned == 0, checks=checks)
