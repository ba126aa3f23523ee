"""Asked against built: what a builder did with a precision plan, and the kernels that prove it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diag.kernels.kernel import WIDTH_BITS, Kernel
from diag.kernels.nodes import MULTIPLYING_OPS, NodeMap, built_types, map_nodes, operand_types

Kind = Literal[
    "format-absent",
    "not-lowered",
    "lowered",
    "pin-swallowed",
    "pin-spread",
    "pin-hidden",
    "fp16-accumulation",
    "norm-in-fp16",
    "tf32",
    "reformats",
    "folded",
]
Severity = Literal["error", "warning", "note"]

_SEVERITY: Mapping[Kind, Severity] = {
    "format-absent": "error",
    "not-lowered": "error",
    "lowered": "error",
    "pin-swallowed": "error",
    "pin-spread": "warning",
    "pin-hidden": "note",
    "fp16-accumulation": "warning",
    "norm-in-fp16": "warning",
    "tf32": "note",
    "reformats": "note",
    "folded": "note",
}

_SAME = {
    "fp8_e4m3": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
    "tf32": "fp32",
}  # a plan's word and the built type that honours it
_SHOWN = 3

# Generated kernels are named by their steps: a cast right before the mean (or its square) means FP32 inside.
_WIDENS = re.compile(r"Cast?(?:Mul|Sub|Pow|Sqr|Add)*Mea")


@dataclass(frozen=True, slots=True)
class AuditFact:
    """One thing the build did, in terms of the user's nodes."""

    kind: Kind
    text: str
    nodes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    asked: str = ""
    built: str = ""
    count: int = 0
    """Kernels, or nodes, that the fact is about."""
    time_ms: float | None = None
    """What these kernels take, when their times are known."""

    @property
    def severity(self) -> Severity:
        """Errors break the plan, warnings endanger accuracy or speed, notes explain."""
        return _SEVERITY[self.kind]


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked of a build, by ONNX node."""

    formats: Mapping[str, str]
    """Node to format, for every node whose precision the plan decides."""
    op_types: Mapping[str, str]
    pinned: Collection[str] = frozenset()
    norms: Collection[str] = frozenset()
    """Nodes that are norms, or parts of a decomposed one."""
    fp16_norm_warning: bool = False
    """Whether TensorRT's parser itself warned of norms in FP16 (see `verbose_log.warns_of_fp16_norms`)."""

    def asked(self, node: str) -> str:
        """The format asked for, in the words of built types; '' when nothing was asked."""
        return _SAME.get(self.formats.get(node, ""), self.formats.get(node, ""))


def audit(kernels: Sequence[Kernel], request: Request) -> list[AuditFact]:
    """Compare a build with what was asked; the worst facts first. An empty list: built as asked."""
    node_map = map_nodes(kernels, (*request.formats, *request.norms))
    built = built_types(node_map, request.op_types)
    absent = _absent_formats(kernels, request)
    missing = {fact.asked for fact in absent}
    facts = [
        *absent,
        *_node_facts(node_map, built, request, missing),
        *_fp16_accumulation(kernels, request),
        *_fp16_norms(node_map, request),
        *_tf32(kernels, request),
        *_reformats(kernels),
        *_folded(node_map, request),
    ]
    order = ("error", "warning", "note")
    return sorted(facts, key=lambda fact: order.index(fact.severity))


def _multiplying(request: Request) -> Iterable[str]:
    return (node for node in request.formats if request.op_types.get(node) in MULTIPLYING_OPS)


def _absent_formats(kernels: Sequence[Kernel], request: Request) -> list[AuditFact]:
    """Formats that were asked for and that not one tensor of the engine has."""
    present = {dtype for kernel in kernels for dtype in kernel.dtypes}
    wanted: dict[str, list[str]] = {}
    for node in request.formats:
        wanted.setdefault(request.asked(node), []).append(node)
    return [
        AuditFact(
            "format-absent",
            f"{name} was asked for {_count(nodes, 'node')}, and none of the engine's {len(kernels)} kernels "
            f"has a tensor of that type; it holds {', '.join(sorted(present)) or 'none'}",
            nodes=tuple(nodes),
            asked=name,
            count=len(nodes),
        )
        for name, nodes in wanted.items()
        if name in WIDTH_BITS and name not in present
    ]


def _node_facts(
    node_map: NodeMap, built: Mapping[str, str], request: Request, missing: Collection[str]
) -> list[AuditFact]:
    facts = []
    pin_kernels = {
        k.name for node in request.pinned for k in [_main(node_map, node, request)] if k is not None
    }
    for node in node_map.kernels_of:
        asked, have = request.asked(node), built.get(node, "")
        kernel = _main(node_map, node, request)
        if kernel is None or not have or asked not in WIDTH_BITS or have == asked or asked in missing:
            continue
        kind = _mismatch(node, kernel, asked, have, request, pin_kernels)
        if kind is not None:
            facts.append(_node_fact(kind, node, kernel, asked, have))
    return facts


def _main(node_map: NodeMap, node: str, request: Request) -> Kernel | None:
    return node_map.main(node, request.op_types.get(node, ""))


def _mismatch(
    node: str, kernel: Kernel, asked: str, have: str, request: Request, pin_kernels: Collection[str]
) -> Kind | None:
    pinned = node in request.pinned
    if request.op_types.get(node) not in MULTIPLYING_OPS:
        # Only a kernel's borders show a type: a pin inside a fusion that no border shows cannot be verified.
        return "pin-hidden" if pinned and asked not in kernel.dtypes else None
    if asked in operand_types(kernel) and len(operand_types(kernel)) > 1 and not kernel.math_type:
        return None  # fused attention: one kernel runs two MatMuls, each with operands of its own
    narrower = WIDTH_BITS[have] < WIDTH_BITS[asked]
    if pinned:
        return "pin-swallowed"
    if narrower:
        return "lowered"
    return "pin-spread" if kernel.name in pin_kernels else "not-lowered"


_SENTENCES: Mapping[str, str] = {
    "pin-swallowed": "{node} is pinned to {asked} and was built in {built}",
    "lowered": "{node} was to stay in {asked} and was built in {built}",
    "pin-spread": "{node} was asked in {asked} and shares a kernel with a pin: it was built in {built}",
    "not-lowered": "{node} was asked in {asked} and was built in {built}",
    "pin-hidden": "{node} is pinned to {asked}; it is fused into a kernel that writes {built}, so the type "
    "inside cannot be seen",
}


def _node_fact(kind: Kind, node: str, kernel: Kernel, asked: str, built: str) -> AuditFact:
    return AuditFact(
        kind,
        _SENTENCES[kind].format(node=node, asked=asked, built=built) + f" (kernel {kernel.name})",
        nodes=(node,),
        kernels=(kernel.name,),
        asked=asked,
        built=built,
        count=1,
        time_ms=kernel.time_ms,
    )


def _fp16_accumulation(kernels: Sequence[Kernel], request: Request) -> list[AuditFact]:
    found = [k for k in kernels if k.accumulator == "fp16"]
    if not found:
        return []
    nodes = _nodes_of(found, _multiplying(request))
    text = f"{_count(found, 'kernel')} of {len(kernels)} add up products in FP16: {_some(nodes)}"
    return [_kernel_fact("fp16-accumulation", text, found, nodes, built="fp16")]


def _tf32(kernels: Sequence[Kernel], request: Request) -> list[AuditFact]:
    found = [k for k in kernels if k.math_type == "tf32"]
    if not found:
        return []
    nodes = _nodes_of(found, _multiplying(request))
    text = f"{_count(found, 'kernel')} multiply FP32 operands in TF32 (10 bits of mantissa): {_some(nodes)}"
    return [_kernel_fact("tf32", text, found, nodes, built="tf32")]


def _fp16_norms(node_map: NodeMap, request: Request) -> list[AuditFact]:
    """Norms all of whose kernels work in FP16 alone, or of which the parser itself warned."""
    nodes, found = [], {}
    for node in request.norms:
        kernels = [k for k in node_map.kernels_of.get(node, ()) if not k.multiplies]
        types = {dtype for k in kernels for dtype in k.dtypes}
        if "fp16" in types and "fp32" not in types and not any(_WIDENS.search(k.name) for k in kernels):
            nodes.append(node)
            found.update({k.name: k for k in kernels})
    if not nodes and not request.fp16_norm_warning:
        return []
    text = f"{_count(nodes, 'norm node')} run in FP16 alone: {_some(nodes)}"
    if request.fp16_norm_warning:
        text = "TensorRT's parser warns of LayerNorm nodes in FP16" + (f"; {text}" if nodes else "")
    return [_kernel_fact("norm-in-fp16", text, list(found.values()), nodes, built="fp16")]


def _reformats(kernels: Sequence[Kernel]) -> list[AuditFact]:
    found = [k for k in kernels if k.is_reformat]
    if not found:
        return []
    time_ms = _time(found)
    price = "" if time_ms is None else f", {time_ms:.4g} ms of {_time(kernels) or 0.0:.4g} ms"
    text = f"{_count(found, 'kernel')} of {len(kernels)} only move, copy or convert tensors{price}"
    return [_kernel_fact("reformats", text, found, ())]


def _folded(node_map: NodeMap, request: Request) -> list[AuditFact]:
    """Multiplying nodes that no kernel names: their type cannot be verified."""
    nodes = [n for n in node_map.folded if request.op_types.get(n) in MULTIPLYING_OPS]
    if not nodes:
        return []
    text = f"{_count(nodes, 'multiplying node')} of the model are named by no kernel: {_some(nodes)}"
    return [AuditFact("folded", text, nodes=tuple(nodes), count=len(nodes))]


def _kernel_fact(
    kind: Kind, text: str, kernels: Sequence[Kernel], nodes: Sequence[str], *, built: str = ""
) -> AuditFact:
    return AuditFact(
        kind,
        text,
        nodes=tuple(nodes),
        kernels=tuple(k.name for k in kernels),
        built=built,
        count=len(kernels) or len(nodes),
        time_ms=_time(kernels),
    )


def _time(kernels: Iterable[Kernel]) -> float | None:
    """Sum of the known times; None when none is known."""
    times = [k.time_ms for k in kernels if k.time_ms is not None]
    return sum(times) if times else None


def _nodes_of(kernels: Sequence[Kernel], candidates: Iterable[str]) -> list[str]:
    named = {node for kernel in kernels for node in kernel.nodes}
    return [node for node in candidates if node in named]


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _some(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:_SHOWN]) or "none of them of a node that was asked about"
    return shown + (f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else "")
