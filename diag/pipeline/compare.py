"""The main job: a model under a precision plan, compared layer by layer with its FP32 reference."""

from __future__ import annotations

import datetime
import hashlib
import platform
import resource
import shlex
import time
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path

import diag
from diag.calibration.table import CalibrationTable
from diag.compare.comparison import Comparison, TensorKind
from diag.engines import onnxruntime as ort_engine
from diag.engines.paired import Watch, pair
from diag.engines.reference import Trust, examine
from diag.engines.slices import SlicedRun
from diag.errors import EngineError, UsageError
from diag.feeds import Feeds, open_feeds
from diag.files import output_folder, write_texts
from diag.gate.evaluate import evaluate
from diag.gate.threshold import require_outputs
from diag.model import shapes
from diag.model.graph import Model
from diag.model.save import save_model
from diag.pipeline import findings as findings_of
from diag.pipeline.layers import birth_infos, layer_infos, output_infos
from diag.pipeline.prepare import Planned, calibrate, choose_plan, plan_on, read_scales
from diag.pipeline.run import Checkpoint, run_batches
from diag.pipeline.settings import CompareSettings, compare_rules, good_from_db
from diag.plan.schema import Pin, plan_sha256, plan_to_yaml
from diag.progress import Progress
from diag.render.html import render_html
from diag.report.io import checked_text
from diag.report.schema import (
    Finding,
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

STATE_FILE = ".compare.state.npz"
MEND_FILE = "mend.yaml"
ENGINES = ("emulate", "tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class _Clock:
    started: datetime.datetime
    begin: float


@dataclass(frozen=True)
class _Job:
    """What one comparison is made from."""

    settings: CompareSettings
    planned: Planned
    feeds: Feeds
    typed: TypedModel
    trust: Trust
    table: CalibrationTable | None
    calibration: str
    clock: _Clock


def compare(settings: CompareSettings, progress: Progress) -> Report:
    """Run the comparison and write report.json, report.html and plan.yaml into `settings.out`.

    Where findings ask for pins, mend.yaml is the plan with these pins added.
    """
    clock = _Clock(datetime.datetime.now(datetime.UTC), time.monotonic())
    refuse_engine(settings.engine)
    out = output_folder(settings.out)
    planned = plan_on(settings.model, choose_plan(settings.plan, settings.format))
    refuse_settings(planned, settings)
    feeds = open_feeds(settings.data, planned.model.inputs, settings.limit)
    progress.start("examining the FP32 reference", None)
    trust = examine(planned.model, feeds.first(), planned.types)
    table, calibration = calibrate(planned, feeds, settings.calibration, progress)
    progress.start("rewriting the model", None)
    typed = planned.apply(table)
    if settings.save_typed:
        save_model(typed.proto, typed.weights, out / "typed.onnx")
    job = _Job(settings, planned, feeds, typed, trust, table, calibration, clock)
    comparison, watches = _compare_layers(job, progress)
    report = _report(job, comparison, watches)
    _write(report, job, out)
    return report


def refuse_engine(engine: str) -> None:
    """Only the emulator can be compared in this release. Raises EngineError for the others."""
    if engine not in ENGINES and not engine.endswith(".engine"):
        raise UsageError(f"there is no engine {engine!r}", f"Choose {', '.join(ENGINES)} or a FILE.engine.")
    if engine != "emulate":
        raise EngineError(
            f"engine {engine!r} cannot be compared in this release", "Leave --engine out to use the emulator."
        )


def refuse_settings(planned: Planned, settings: CompareSettings) -> None:
    """What would fail only after the long run: thresholds on no output, a table that does not fit."""
    outputs = [n for n, info in planned.model.outputs.items() if info.is_float or not info.elem_type]
    require_outputs(settings.fail_under, outputs)
    if settings.calibration is not None:
        read_scales(planned, settings.calibration)


def _compare_layers(job: _Job, progress: Progress) -> tuple[Comparison, tuple[Watch, ...]]:
    model, types = job.planned.model, job.planned.types
    paired = pair(model, Model("typed", job.typed.proto, job.typed.weights, ""), types)
    concrete = shapes.infer(model, shapes.bind(model, job.feeds.shapes()), job.trust.shape_values)
    progress.start("loading the sessions", None)
    run = SlicedRun(paired, concrete, job.settings.slice_mb << 20)
    comparison = Comparison(_kinds(job.planned, job.trust))
    checkpoint = Checkpoint(Path(job.settings.out) / STATE_FILE, _key(job)) if job.settings.resume else None
    run_batches(run, job.feeds, comparison, checkpoint, progress)
    return comparison, paired.watches


def _kinds(planned: Planned, trust: Trust) -> dict[str, TensorKind]:
    """How each tensor is judged: softmax outputs as distributions, the logits of heads as decisions."""
    kinds: dict[str, TensorKind] = {}
    for layer in planned.model.layers:
        role = planned.roles[layer.id].name
        for name in layer.outputs:
            if layer.op_type == "Softmax":
                kinds[name] = TensorKind("probabilities")
            elif (
                name in planned.model.outputs
                and role in ("lm_head", "head")
                and layer.op_type in ("MatMul", "Gemm", "Add")
            ):
                kinds[name] = TensorKind("logits", noise=trust.noise.get(name, 0.0))
            elif layer.op_type in ("Conv", "ConvTranspose"):
                kinds[name] = TensorKind(convolution=True)
    return kinds


def _key(job: _Job) -> str:
    """Identity of a run: what must be equal for its batches to count for another."""
    ranges = job.table.model_dump_json() if job.table else ""
    parts = (
        diag.__version__,
        job.planned.model.sha256,
        plan_sha256(job.planned.plan),
        job.feeds.sha256,
        ranges,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _report(job: _Job, comparison: Comparison, watches: tuple[Watch, ...]) -> Report:
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
        findings=findings_of.find(evidence, reference),
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


def _run_info(job: _Job, comparison: Comparison, reference: ReferenceTrust) -> RunInfo:
    packages = ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")
    versions = {"trtdiag": diag.__version__, "python": platform.python_version()}
    versions |= {name: package_version(name) for name in packages}
    return RunInfo(
        command=job.settings.command,
        engine=f"emulation by ONNX Runtime {ort_engine.version()}",
        versions=versions,
        flags={"tf32": "off (CPU)", "constants out of range": job.planned.plan.constants.out_of_range},
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


def _write(report: Report, job: _Job, out: Path) -> None:
    """Write every file of the report, none before all are whole."""
    plan, mend = job.planned.plan, out / MEND_FILE
    texts = {out / "plan.yaml": plan_to_yaml(plan)}
    pins = findings_of.mending_pins(report.findings)
    if pins:
        added = tuple(_plan_pin(pin) for pin in pins.values())
        texts[mend] = plan_to_yaml(plan.model_copy(update={"pins": (*plan.pins, *added)}))
        _name_command(report.findings, job.settings, mend)
    texts[out / "report.html"] = render_html(report)
    texts[out / "report.json"] = checked_text(report, repr(str(out / "report.json")))
    write_texts(texts)
    if not pins:
        mend.unlink(missing_ok=True)


def _plan_pin(pin: PinInfo) -> Pin:
    return Pin.model_validate({"match": pin.target, "format": pin.format, "reason": pin.reason})


def _name_command(findings: list[Finding], settings: CompareSettings, mend: Path) -> None:
    """The line that measures the mend, on the same data and with the same scales."""
    words = ["trtdiag", "compare", settings.model, "--plan", str(mend), "--data", settings.data]
    if settings.limit is not None:
        words += ["--limit", str(settings.limit)]
    if settings.calibration is not None:
        words += ["--calibration", settings.calibration]
    command = shlex.join([*words, "--out", f"{settings.out.rstrip('/')}-mended"])
    for finding in findings:
        if finding.mend.pins:
            finding.mend.command = command
