"""From kernels, facts and a stamp to a report: what an engine holds, without running it."""

from __future__ import annotations

import platform
import re
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import diag
from diag.engines.stamp import Stamp
from diag.kernels import kernel as kernels_of
from diag.kernels.audit import AuditFact, Request
from diag.kernels.known import Match
from diag.kernels.nodes import MULTIPLYING_OPS, NodeMap, map_nodes, multiplied_in
from diag.model.graph import Model
from diag.pipeline.build.audit_findings import built_counts, data_layers, is_unmet, types_of
from diag.pipeline.prepare import Planned
from diag.plan.schema import Plan, plan_sha256
from diag.report.schema import (
    Finding,
    GroupInfo,
    Kernel,
    LayerInfo,
    Mend,
    ModelInfo,
    PinInfo,
    PlanInfo,
    RunInfo,
)
from diag.roles import Role

_OPERATOR = re.compile(rf"(?:^|[/_])({'|'.join(sorted(MULTIPLYING_OPS, key=len, reverse=True))})(?:_\d+)?$")
_NORM = re.compile(
    r"LayerNormalization|InstanceNormalization|GroupNormalization|layer_?norm|rms_?norm|norm/", re.I
)


@dataclass(frozen=True)
class Subject:
    """What is inspected, and what it is held against."""

    file: str
    kernels: Sequence[kernels_of.Kernel]
    stamp: Stamp | None
    model: Model | None
    roles: Mapping[str, Role]
    planned: Planned | None
    plan: Plan | None
    request: Request


@dataclass(frozen=True)
class Overview:
    """An engine in a few numbers."""

    kernels: int
    multiplying: Mapping[str, int]
    """Kernels that multiply, by the type in which they take their operands."""
    accumulators_known: bool
    """Whether any tactic tells in which type it adds up; TensorRT-RTX's never do."""
    written: Mapping[str, int]
    """Tensors that kernels write, by type."""
    named: int
    """Nodes that a kernel names."""
    folded: int
    """Nodes that no kernel names; 0 without a model, whose nodes alone can be missed."""
    reformats: int
    time_ms: float | None
    reformat_time_ms: float | None
    built: Mapping[str, Mapping[str, int]]
    """Layers by the format asked for, and the types in which they were built."""


def overview(subject: Subject) -> Overview:
    """Count what the engine holds."""
    kernels, node_map = subject.kernels, _node_map(subject)
    reformats = [k for k in kernels if k.is_reformat]
    return Overview(
        kernels=len(kernels),
        multiplying=Counter(multiplied_in(k) or "unknown" for k in kernels if k.multiplies),
        accumulators_known=any(k.accumulator for k in kernels),
        written=Counter(t.dtype for k in kernels for t in k.outputs if t.dtype),
        named=len(node_map.kernels_of),
        folded=len(node_map.folded),
        reformats=len(reformats),
        time_ms=_time(kernels),
        reformat_time_ms=_time(reformats),
        built=built_counts(kernels, subject.request),
    )


def _time(kernels: Sequence[kernels_of.Kernel]) -> float | None:
    times = [k.time_ms for k in kernels if k.time_ms is not None]
    return sum(times) if times else None


def _node_map(subject: Subject) -> NodeMap:
    if subject.model is not None:
        return map_nodes(subject.kernels, data_layers(subject.model))
    return map_nodes(subject.kernels, (node for k in subject.kernels for node in k.nodes))


def request_for_kernels(
    kernels: Sequence[kernels_of.Kernel], plan: Plan | None, *, fp16_norm_warning: bool
) -> Request:
    """What is asked of an engine whose model is not at hand: node names alone tell what a node is.

    Where no name tells, only the presence of the plan's format can be checked.
    """
    names = dict.fromkeys(node for k in kernels for node in k.nodes)
    op_types = {name: match[1] for name in names if (match := _OPERATOR.search(name))}
    asked = op_types or dict.fromkeys(node for k in kernels if k.multiplies for node in k.nodes)
    formats = dict.fromkeys(asked, plan.default if plan is not None else "")
    norms = tuple(name for name in names if _NORM.search(name))
    return Request(formats, op_types, norms=norms, fp16_norm_warning=fp16_norm_warning)


def kernel_infos(kernels: Sequence[kernels_of.Kernel]) -> list[Kernel]:
    """The report's kernels, in execution order."""
    return [
        Kernel(
            name=k.name,
            layers=list(k.nodes),
            inputs=[t.name for t in k.inputs],
            outputs=[t.name for t in k.outputs],
            input_types=[t.dtype for t in k.inputs],
            output_types=[t.dtype for t in k.outputs],
            tactic=k.tactic,
            accumulator=k.accumulator,
            time_ms=k.time_ms,
        )
        for k in kernels
    ]


def layer_infos(subject: Subject) -> list[LayerInfo]:
    """One entry for each node that an engine has to run: the type it was built in, or that it was folded."""
    node_map = _node_map(subject)
    types = types_of(node_map, subject.request)
    nodes = data_layers(subject.model) if subject.model else list(node_map.kernels_of)
    return [_layer_info(node, subject, node_map, types.get(node, "")) for node in nodes]


def _layer_info(node: str, subject: Subject, node_map: NodeMap, built: str) -> LayerInfo:
    asked = subject.request.formats.get(node, "")
    op_type = subject.request.op_types.get(node, "")
    kernel = node_map.main(node, op_type)
    layer = subject.model.layer_by_id[node] if subject.model else None
    role = subject.roles.get(node)
    return LayerInfo(
        id=node,
        name=node,
        op_type=op_type,
        role=role.name if role else "other",
        block=role.block if role else None,
        format=asked or built or "unknown",
        built=built if kernel else "folded",
        outputs=list(layer.outputs) if layer else [],
        source=str(layer.source or "") if layer else "",
        status="not_run" if kernel else "not_observable",
        reason=_reason(asked, built, kernel),
    )


def _reason(asked: str, built: str, kernel: kernels_of.Kernel | None) -> str:
    if kernel is None:
        return "folded away: no kernel names it"
    request = f"asked in {asked}, " if asked else ""
    return f"{request}built in {built or 'a type that is not told'} by kernel {kernel.name}"


def plan_info(subject: Subject) -> PlanInfo | None:
    """The plan that the engine is held against."""
    plan, planned = subject.plan, subject.planned
    if plan is None:
        return None
    pins = planned.resolved.pins if planned else ()
    return PlanInfo(
        default=plan.default,
        base=plan.base,
        pins=[PinInfo(target=p.target, format=p.format, reason=p.reason, layers=len(p.layers)) for p in pins],
        groups=[
            GroupInfo(kind=g.kind, layers=list(g.layers))
            for g in (planned.resolved.groups if planned else ())
        ],
        sha256=plan_sha256(plan),
    )


def model_info(subject: Subject) -> ModelInfo:
    """The model; without one, the inspected file stands for it, with what its stamp knows."""
    if subject.model is None:
        sha256 = subject.stamp.identity.model_sha256 if subject.stamp else ""
        return ModelInfo(path=subject.file, sha256=sha256, opset=0, node_count=0)
    return model_info_of(subject.model)


def model_info_of(model: Model) -> ModelInfo:
    """The report's entry on a model."""
    return ModelInfo(path=model.path, sha256=model.sha256, opset=model.opset, node_count=len(model.layers))


def run_info(stamp: Stamp | None, file: str, command: str) -> RunInfo:
    """How the file was read. Nothing was run: no data, no batches; the caller fills in the times."""
    versions = {"trtdiag": diag.__version__, "python": platform.python_version()}
    flags = {"file": file}
    if stamp is not None:
        versions[stamp.flavour] = stamp.version
        where = stamp.gpu or stamp.compute_capability
        flags |= {"built for": where, **stamp.flags} if where else dict(stamp.flags)
    engine = f"{stamp.flavour} {stamp.version}" if stamp else "an engine of unknown version"
    return RunInfo(
        command=command,
        engine=f"{engine}, read and not run",
        versions=versions,
        flags=flags,
        data="",
        batches=0,
        samples=0,
        seconds=0.0,
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        started="",
    )


def known_issue_findings(matches: Sequence[Match]) -> list[Finding]:
    """Reported defects that fit, as notes: leads, which only a comparison can confirm."""
    return [
        Finding(
            id=f"known-{match.issue.id}",
            kind="engine-defect",
            severity="note",
            layers=list(match.layers),
            title=f"Reported for this version and structure ({match.issue.source}): {match.issue.symptom}",
            evidence={
                "source": match.issue.source,
                "also": ", ".join(match.issue.also),
                "fixed_in": match.issue.fixed_in or "unknown",
            },
            mend=Mend(text=match.issue.workaround),
        )
        for match in matches
    ]


def verdict(subject: Subject, facts: Sequence[AuditFact], counted: Overview) -> str:
    """One sentence: how much of what was asked was built."""
    asked = sum(1 for fmt in subject.request.formats.values() if fmt)
    coverage = ""
    if subject.model is not None:
        total = counted.named + counted.folded
        coverage = f"; they name {counted.named} of {total} nodes, the others are folded away"
    kernels = f"{counted.kernels} kernels{coverage}"
    if not asked:
        types = ", ".join(f"{number} in {name}" for name, number in sorted(counted.multiplying.items()))
        return f"{kernels}; {sum(counted.multiplying.values())} multiply ({types or 'none'})."
    unmet = {node for fact in facts if is_unmet(fact) for node in fact.nodes}
    plan = f"{subject.plan.default.upper()}: " if subject.plan else ""
    return f"{plan}{asked - len(unmet)} of {asked} layers were built as asked; {kernels}."
