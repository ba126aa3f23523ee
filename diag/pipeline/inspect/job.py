"""Reads an engine, an inspector's JSON, a build log, a cache or a Q/DQ model: `trtdiag inspect`."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path

from diag.engines.live import load_kernels
from diag.engines.scale_cache import ScaleCache
from diag.engines.stamp import Identity, Stamp, check_stamp, read_stamp, stamp_path
from diag.errors import UsageError
from diag.files import output_folder, write_texts
from diag.kernels.audit import AuditFact, Request, audit
from diag.kernels.kernel import Kernel
from diag.kernels.known import Build, match_known_issues
from diag.kernels.read import INSPECTOR_SUFFIX, LOG_SUFFIX, Source, detect_source, read_kernels, with_times
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import load_model
from diag.pipeline.build.audit_findings import (
    applicable_formats,
    findings_of,
    parser_warned,
    request_for_model,
    request_for_plan,
    request_unasked,
    strict_gate,
)
from diag.pipeline.inspect import report as parts
from diag.pipeline.inspect.cache import cache_verdict, inspect_cache
from diag.pipeline.inspect.qdq import QdqInspection, inspect_qdq
from diag.pipeline.prepare import Planned, choose_plan, plan_on
from diag.plan.schema import Plan, plan_sha256
from diag.progress import Progress
from diag.render.html import render_html
from diag.report.io import checked_text
from diag.report.schema import Finding, ModelInfo, Report
from diag.roles import find_roles
from diag.typed.types import complete

REPORT_FILES = ("report.json", "report.html")


@dataclass(frozen=True)
class InspectSettings:
    """Options of `trtdiag inspect`, in its terms."""

    file: str
    model: str | None = None
    plan: str | None = None
    format: str | None = None
    times: str | None = None
    out: str | None = None
    strict: bool = False
    command: str = "trtdiag inspect"


@dataclass(frozen=True)
class Inspection:
    """A report, and what the terminal shows of it."""

    report: Report
    facts: tuple[AuditFact, ...] = ()
    overview: parts.Overview | None = None
    cache: ScaleCache | None = None
    notes: tuple[str, ...] = ()
    qdq: QdqInspection | None = None


@dataclass(frozen=True)
class _Against:
    """What a file is held against; all of it optional."""

    model: Model | None
    planned: Planned | None
    plan: Plan | None

    @property
    def identity(self) -> Identity:
        model = self.model.sha256 if self.model else ""
        return Identity(model, plan_sha256(self.plan) if self.plan else "")


def inspect(settings: InspectSettings, progress: Progress) -> Inspection:
    """Read the file, hold it against model and plan, and write the report if `settings.out` names a folder.

    Raises DataError, EngineError, TableError for files that cannot be read or belong to something else.
    """
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    source = detect_source(settings.file)
    _refuse_unread(settings, source)
    out = output_folder(settings.out) if settings.out is not None else None
    against = _against(settings)
    if source == "cache":
        inspection = _inspect_cache(settings, against)
    elif source == "onnx":
        inspection = _inspect_model(settings, progress)
    else:
        inspection = _inspect_engine(settings, against, progress)
    report = inspection.report
    report.run.started, report.run.seconds = started, time.monotonic() - began
    if settings.strict:
        report.gate = strict_gate(report.findings)
    if out is not None:
        more = inspection.qdq.write(out) if inspection.qdq is not None else {}
        write_texts(
            {
                **more,
                out / "report.html": render_html(report),
                out / "report.json": checked_text(report, repr(str(out / "report.json"))),
            }
        )
    return inspection


def _refuse_unread(settings: InspectSettings, source: Source) -> None:
    """Raise UsageError for options that this kind of file has no use for."""
    given = {"--model": settings.model, "--plan": settings.plan, "--format": settings.format}
    given["--times"] = settings.times
    if source == "onnx":
        refused, reason = list(given), "an ONNX model is read as it is"
    elif source == "cache":
        refused, reason = ["--plan", "--format", "--times"], "a calibration cache holds scales only"
    else:
        return
    if any(given[name] is not None for name in refused):
        raise UsageError(reason, f"Leave out {', '.join(refused[:-1])} and {refused[-1]}.")


def _against(settings: InspectSettings) -> _Against:
    has_plan = settings.plan is not None or settings.format is not None
    plan = choose_plan(settings.plan, settings.format) if has_plan else None
    if settings.model is None:
        if plan is not None and plan.pins:
            raise UsageError("a plan with pins names layers of a model", "Give --model MODEL too.")
        return _Against(None, None, plan)
    if plan is None:
        return _Against(load_model(settings.model), None, None)
    planned = plan_on(settings.model, plan)
    return _Against(planned.model, planned, plan)


def _inspect_model(settings: InspectSettings, progress: Progress) -> Inspection:
    progress.start(f"reading {Path(settings.file).name}", None)
    found = inspect_qdq(settings.file, settings.command)
    return Inspection(found.report, qdq=found)


def _inspect_engine(settings: InspectSettings, against: _Against, progress: Progress) -> Inspection:
    file = Path(settings.file)
    stamp, notes = _stamp(file, against)
    progress.start(f"reading {file.name}", None)
    kernels = _kernels(file)
    if settings.times is not None:
        kernels = with_times(kernels, settings.times)
    roles = find_roles(against.model) if against.model else {}
    request = _request(file, kernels, stamp, against)
    subject = parts.Subject(
        settings.file, kernels, stamp, against.model, roles, against.planned, against.plan, request
    )
    facts = tuple(audit(kernels, request))
    counted = parts.overview(subject)
    report = Report(
        schema="trtdiag.report/1",
        model=parts.model_info(subject),
        plan=parts.plan_info(subject),
        run=parts.run_info(stamp, settings.file, settings.command),
        verdict=parts.verdict(subject, facts, counted),
        layers=parts.layer_infos(subject),
        kernels=parts.kernel_infos(kernels),
        findings=[*findings_of(facts), *_known(kernels, stamp, against.model)],
    )
    return Inspection(report, facts, counted, notes=notes)


def _kernels(file: Path) -> tuple[Kernel, ...]:
    """From the file, from what lies beside an engine, or else from the engine itself on its GPU."""
    if detect_source(file) == "engine":
        beside = (file.with_name(file.name + suffix) for suffix in (INSPECTOR_SUFFIX, LOG_SUFFIX))
        if not any(path.is_file() for path in beside):
            return load_kernels(file)
    return read_kernels(file)


def _stamp(file: Path, against: _Against) -> tuple[Stamp | None, tuple[str, ...]]:
    """The engine's stamp, checked against model and plan; none, with a note, where there is none.

    Raises EngineError when the engine was built from another model or plan, or changed since.
    """
    engine = file
    for suffix in (INSPECTOR_SUFFIX, LOG_SUFFIX):
        engine = engine.with_name(engine.name.removesuffix(suffix))
    if stamp_path(engine).is_file() and stamp_path(engine) != file:
        stamp = check_stamp(engine, against.identity) if engine == file else read_stamp(engine)
        return stamp, ()
    if against.model is None:
        return None, ()
    return None, (f"{file.name} has no stamp: whether it was built from this model is not known",)


def _request(file: Path, kernels: tuple[Kernel, ...], stamp: Stamp | None, against: _Against) -> Request:
    log = file if detect_source(file) == "log" else file.with_name(file.name + LOG_SUFFIX)
    if against.planned is not None:
        return request_for_plan(against.planned, applicable_formats(against.planned), log)
    if against.model is not None and (stamp is None or stamp.identity.plan_sha256):
        return request_unasked(against.model, log)
    if against.model is not None:  # the stamp says that it was built as it is
        return request_for_model(against.model, complete(shapes.infer(against.model), against.model), log)
    return parts.request_for_kernels(kernels, against.plan, fp16_norm_warning=parser_warned(log))


def _known(kernels: tuple[Kernel, ...], stamp: Stamp | None, model: Model | None) -> list[Finding]:
    if stamp is None or stamp.flavour != "tensorrt":  # TensorRT-RTX counts versions of its own
        return []
    build = Build(stamp.version, stamp.compute_capability, kernels)
    return parts.known_issue_findings(match_known_issues(build, model))


def _inspect_cache(settings: InspectSettings, against: _Against) -> Inspection:
    cache, findings = inspect_cache(settings.file, against.model)
    model = against.model
    nothing = ModelInfo(path=settings.file, sha256="", opset=0, node_count=0)
    info = nothing if model is None else parts.model_info_of(model)
    run = parts.run_info(None, settings.file, settings.command)
    run.engine = f"calibration cache of TensorRT {cache.version} ({cache.algorithm})"
    verdict = cache_verdict(cache, findings)
    report = Report(schema="trtdiag.report/1", model=info, run=run, verdict=verdict, findings=findings)
    return Inspection(report, cache=cache)
