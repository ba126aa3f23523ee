"""The main job: a model under a precision plan, compared layer by layer with its FP32 reference."""

from __future__ import annotations

import datetime
import hashlib
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diag
from diag.compare.comparison import Comparison
from diag.engines import onnxruntime as ort_engine
from diag.engines.paired import Watch, pair
from diag.engines.reference import examine
from diag.engines.slices import SlicedRun
from diag.engines.stamp import sha256_of
from diag.errors import NotEnoughEvidenceError, UsageError
from diag.feeds import open_feeds
from diag.files import output_folder, write_texts
from diag.gate.threshold import require_outputs
from diag.model import shapes
from diag.model.save import save_model
from diag.pipeline.compare import findings as findings_of
from diag.pipeline.compare.assemble import Clock, Job, assemble
from diag.pipeline.compare.kinds import tensor_kinds
from diag.pipeline.compare.run import Checkpoint, run_batches
from diag.pipeline.engine.stage import Subject, compare_engine, require_engine
from diag.pipeline.prepare import Planned, calibrate, choose_plan, plan_on, read_scales
from diag.pipeline.settings import CompareSettings
from diag.plan.schema import pin_for, plan_sha256, plan_to_yaml
from diag.progress import Progress
from diag.render.html import render_html
from diag.report.io import checked_text
from diag.report.schema import Finding, Report

STATE_FILE = ".compare.state.npz"
MEND_FILE = "mend.yaml"
ENGINES = ("emulate", "tensorrt", "tensorrt-rtx")


def compare(
    settings: CompareSettings, progress: Progress, amend: Callable[[Report], None] | None = None
) -> Report:
    """Run the comparison and write report.json, report.html and plan.yaml into `settings.out`.

    Where findings ask for pins, mend.yaml is the plan with these pins added. `amend` adds to the report what
    a search found, before it is written.
    """
    clock = Clock(datetime.datetime.now(datetime.UTC), time.monotonic())
    refuse_engine(settings.engine.engine)
    out = output_folder(settings.out)
    planned = plan_on(settings.model, choose_plan(settings.plan, settings.format))
    refuse_settings(planned, settings)
    feeds = open_feeds(settings.data, planned.model.inputs, settings.limit, labelled=settings.labelled)
    progress.start("examining the FP32 reference", None)
    trust = examine(planned.model, feeds.first(), planned.types)
    table, calibration = calibrate(planned, feeds, settings.calibration, progress)
    progress.start("rewriting the model", None)
    typed = planned.apply(table)
    if settings.save_typed:
        save_model(typed.for_engines, typed.weights, out / "typed.onnx")
    job = Job(settings, planned, feeds, typed, trust, table, calibration, clock)
    comparison, watches = _compare_layers(job, progress)
    report = assemble(job, comparison, watches)
    _refuse_emptiness(report)
    if settings.engine.engine != "emulate":
        _add_engine(report, job, out, progress)
    if amend is not None:
        amend(report)
    _write(report, job, out)
    return report


def _refuse_emptiness(report: Report) -> None:
    """Outputs without an element equal anything."""
    if report.outputs and not any(output.metrics.get("elements", 1) for output in report.outputs):
        raise NotEnoughEvidenceError(
            f"no output held an element in {report.run.batches} batch(es): nothing was compared",
            "Give batches of at least one sample.",
        )


def _add_engine(report: Report, job: Job, out: Path, progress: Progress) -> None:
    """Build or open the engine, run it beside the other numerics, and gate what it was found to do."""
    settings = job.settings
    sha = sha256_of(Path(settings.calibration)) if settings.calibration and job.table else ""
    subject = Subject(job.planned, job.typed, job.feeds, out, tensor_kinds(job.planned, job.trust))
    compare_engine(subject, replace(settings.engine, table_sha256=sha), progress).put_into(report)


def refuse_engine(engine: str) -> None:
    """Raises UsageError for a name that is no engine, EngineError for one that cannot work here."""
    if engine not in ENGINES and not engine.endswith(".engine"):
        raise UsageError(f"there is no engine {engine!r}", f"Choose {', '.join(ENGINES)} or a FILE.engine.")
    if engine != "emulate":
        require_engine(engine)


def refuse_settings(planned: Planned, settings: CompareSettings) -> None:
    """What would fail only after the long run: thresholds on no output, a table that does not fit."""
    model = planned.model
    outputs = [
        name
        for name, info in model.outputs.items()
        if name in model.value_dependent and (info.is_float or not info.elem_type)
    ]
    drift = next((threshold for threshold in settings.fail_under if threshold.of_drift), None)
    if drift is not None:
        raise UsageError(
            f"threshold {str(drift)!r} speaks of drift, which is not measured here",
            "Give it to trtdiag gate, with a report of trtdiag drift.",
        )
    require_outputs(settings.fail_under, outputs)
    if settings.calibration is not None:
        read_scales(planned, settings.calibration)


def _compare_layers(job: Job, progress: Progress) -> tuple[Comparison, tuple[Watch, ...]]:
    model, types = job.planned.model, job.planned.types
    paired = pair(model, job.typed.model, types)
    concrete = shapes.infer(model, shapes.bind(model, job.feeds.shapes()), job.trust.shape_values)
    progress.start("loading the sessions", None)
    run = SlicedRun(paired, concrete, job.settings.slice_mb << 20)
    comparison = Comparison(tensor_kinds(job.planned, job.trust))
    checkpoint = Checkpoint(Path(job.settings.out) / STATE_FILE, _key(job)) if job.settings.resume else None
    run_batches(run, job.feeds, comparison, checkpoint, progress)
    return comparison, paired.watches


def _key(job: Job) -> str:
    """Identity of a run: what must be equal for its batches to count for another."""
    ranges = job.table.model_dump_json() if job.table else ""
    parts = (
        diag.__version__,
        ort_engine.version(),
        job.planned.model.sha256,
        plan_sha256(job.planned.plan),
        job.feeds.sha256,
        ranges,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _write(report: Report, job: Job, out: Path) -> None:
    """Write every file of the report, none before all are whole."""
    plan, mend = job.planned.plan, out / MEND_FILE
    texts = {out / "plan.yaml": plan_to_yaml(plan)}
    pins = findings_of.mending_pins(report.findings)
    if pins:
        added = tuple(pin_for(pin.target, pin.format, pin.reason) for pin in pins.values())
        texts[mend] = plan_to_yaml(plan.model_copy(update={"pins": (*plan.pins, *added)}))
        _name_command(report.findings, job.settings, mend)
    texts[out / "report.html"] = render_html(report)
    texts[out / "report.json"] = checked_text(report, repr(str(out / "report.json")))
    write_texts(texts)
    if not pins:
        mend.unlink(missing_ok=True)


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
