"""Puts a comparison's results together as one report."""

from __future__ import annotations

import datetime
import platform
import resource
import time
from dataclasses import dataclass
from importlib.metadata import version as package_version

import diag
from diag.calibration.table import CalibrationTable
from diag.compare.comparison import Comparison
from diag.engines import onnxruntime as ort_engine
from diag.engines.paired import Watch
from diag.engines.reference import Trust
from diag.feeds import Feeds
from diag.gate.evaluate import evaluate
from diag.pipeline.compare import findings as findings_of
from diag.pipeline.compare.layers import birth_infos, layer_infos, output_infos
from diag.pipeline.prepare import Planned
from diag.pipeline.settings import CompareSettings, compare_rules, good_from_db
from diag.pipeline.structure import structure_findings
from diag.plan.schema import plan_sha256
from diag.report.schema import (
    GroupInfo,
    ModelInfo,
    OutputInfo,
    PinInfo,
    PlanInfo,
    ReferenceTrust,
    Report,
    RunInfo,
)
from diag.typed.apply import TypedModel


@dataclass(frozen=True)
class Clock:
    started: datetime.datetime
    begin: float


@dataclass(frozen=True)
class Job:
    """What one comparison is made from."""

    settings: CompareSettings
    planned: Planned
    feeds: Feeds
    typed: TypedModel
    trust: Trust
    table: CalibrationTable | None
    calibration: str
    clock: Clock


def assemble(job: Job, comparison: Comparison, watches: tuple[Watch, ...]) -> Report:
    """The report of a finished comparison."""
    planned, threshold = job.planned, compare_rules().bad_sqnr_db
    model = planned.model
    layers = layer_infos(model, watches, comparison, planned.roles, job.typed.formats)
    births = birth_infos(model, watches, comparison, threshold)
    reference = _reference_trust(job.trust, comparison)
    evidence = findings_of.Evidence(model, layers, births, planned.plan.base, threshold)
    report = Report(
        schema="trtdiag.report/1",
        model=ModelInfo(
            path=model.path, sha256=model.sha256, opset=model.opset, node_count=len(model.layers)
        ),
        plan=_plan_info(planned),
        run=_run_info(job, comparison, reference),
        outputs=output_infos(model, comparison),
        layers=layers,
        births=births,
        findings=[*findings_of.find(evidence, reference), *structure_findings(planned, job.typed)],
    )
    report.verdict = verdict(report, good_from_db(job.settings.fail_under))
    if job.settings.fail_under:
        report.gate = evaluate(report, job.settings.fail_under)
    return report


def _reference_trust(trust: Trust, comparison: Comparison) -> ReferenceTrust:
    tolerance = compare_rules().reference_tolerance_rel_l2
    broken = [n for n, record in comparison.accumulated.items() if record.sums.nonfinite_reference]
    return ReferenceTrust(
        trusted=max(trust.optimisation_rel_l2, trust.jitter_rel_l2) <= tolerance,
        optimisation_rel_l2=trust.optimisation_rel_l2,
        jitter_rel_l2=trust.jitter_rel_l2,
        tolerance_rel_l2=tolerance,
        nonfinite_tensors=broken,
    )


def _plan_info(planned: Planned) -> PlanInfo:
    resolved = planned.resolved
    return PlanInfo(
        default=planned.plan.default,
        base=planned.plan.base,
        pins=[
            PinInfo(target=p.target, format=p.format, reason=p.reason, layers=len(p.layers))
            for p in resolved.pins
        ],
        groups=[GroupInfo(kind=g.kind, layers=list(g.layers)) for g in resolved.groups],
        sha256=plan_sha256(planned.plan),
    )


def _flags(planned: Planned) -> dict[str, str]:
    plan = planned.plan
    flags = {"tf32": "off (CPU)", "constants out of range": plan.constants.out_of_range}
    return flags | ({"placement": plan.placement} if planned.fused else {})


def _run_info(job: Job, comparison: Comparison, reference: ReferenceTrust) -> RunInfo:
    packages = ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")
    versions = {"trtdiag": diag.__version__, "python": platform.python_version()}
    versions |= {name: package_version(name) for name in packages}
    return RunInfo(
        command=job.settings.command,
        engine=f"emulation by ONNX Runtime {ort_engine.version()}",
        versions=versions,
        flags=_flags(job.planned) | _plan_notes(job),
        data=job.feeds.label,
        random_data=job.feeds.random,
        calibration=job.calibration,
        batches=comparison.batches,
        samples=comparison.samples,
        seconds=time.monotonic() - job.clock.begin,
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        seed=job.feeds.seed,
        started=job.clock.started.isoformat(timespec="seconds"),
        reference=reference,
    )


def _plan_notes(job: Job) -> dict[str, str]:
    """What the typed model says of itself: layers that a format is not for, nodes that were added."""
    return {"plan notes": "; ".join(job.typed.notes)} if job.typed.notes else {}


def verdict(report: Report, threshold_db: float) -> str:
    """One sentence: how good the outputs are, and where it begins."""
    if not report.outputs:
        return "No float output could be compared."
    worst = min(report.outputs, key=lambda output: output.metrics["sqnr_db"])
    fmt = report.plan.default.upper() if report.plan else "The plan"
    sentence = f"{fmt}: {_quality(worst, threshold_db)}"
    first = next((birth for birth in report.births if birth.reaches_output), None)
    if first is None:
        return f"{sentence}."
    role = next((layer.role for layer in report.layers if layer.name == first.layer), "other")
    return f"{sentence}; the error begins at {first.layer} ({role})."


def _quality(output: OutputInfo, threshold_db: float) -> str:
    metrics = output.metrics
    value = metrics["sqnr_db"]
    if metrics.get("nonfinite", 0) > 0:
        return f"output {output.name} holds {metrics['nonfinite']:.0f} elements that are not finite"
    if value == float("inf"):
        return f"output {output.name} equals the reference"
    word = "good" if value >= threshold_db else "bad"
    top1 = f", top-1 agreement {metrics['top1']:.3f}" if "top1" in metrics else ""
    return f"output {output.name} is {word}, {value:.1f} dB (cosine {metrics['cosine']:.4f}{top1})"
