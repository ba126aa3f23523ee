"""Builds an engine from a model and a plan, and says what was really built: `trtdiag build`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diag.engines.build import BuildOptions, BuildResult, build_rtx, build_tensorrt
from diag.engines.gpu import find_gpus
from diag.engines.probe import runs_rtx
from diag.engines.stamp import stamp_path
from diag.feeds import open_feeds
from diag.files import output_file
from diag.kernels.audit import AuditFact, Request, audit
from diag.model import shapes
from diag.model.load import load_model
from diag.pipeline.build.audit_findings import built_counts, request_for_model, request_for_plan
from diag.pipeline.build.settings import BuildSettings, refuse_settings
from diag.pipeline.build.sources import Job, Source, write_source
from diag.pipeline.engine.profiles import Profile, profiles_for
from diag.pipeline.prepare import choose_plan, plan_on
from diag.progress import Progress
from diag.typed.types import complete

CURRENT = "CURRENT"
DEFAULT_TARGET = "SM89"
TIMING_CACHE = "timing.cache"
"""In the engine's folder: one for all engines of a sweep."""


@dataclass(frozen=True)
class Built:
    """An engine, what was asked of it, and what it holds."""

    settings: BuildSettings
    result: BuildResult
    target: str
    """Compute capability or GPU that it was built for."""
    request: Request
    facts: tuple[AuditFact, ...]
    profiles: Mapping[str, Profile]
    notes: tuple[str, ...]
    table: Path | None = None
    """The calibration table or cache that was made for it."""

    @property
    def built(self) -> dict[str, dict[str, int]]:
        """Layers by the format asked for, and in which types they were built."""
        return built_counts(self.result.kernels, self.request)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        result, settings = self.result, self.settings
        return {
            "engine": str(result.engine_path),
            "engine_bytes": result.engine_bytes,
            "builder": settings.engine,
            "version": result.version,
            "target": self.target,
            "typing": "weak" if settings.weak else "strong",
            "tf32": settings.tf32,
            "seconds": result.seconds,
            "wall_seconds": result.wall_seconds,
            "kernels": len(result.kernels),
            "built": self.built,
            "profiles": {name: [list(shape) for shape in shapes] for name, shapes in self.profiles.items()},
            "audit": [{**asdict(fact), "severity": fact.severity} for fact in self.facts],
            "notes": list(self.notes),
            "files": self.files,
        }

    @property
    def files(self) -> dict[str, str]:
        """What lies beside the engine."""
        assert self.result.engine_path is not None
        paths = {
            "stamp": stamp_path(self.result.engine_path),
            "log": self.result.log_path,
            "inspector": self.result.inspector_path,
            "calibration": self.table,
        }
        return {name: str(path) for name, path in paths.items() if path is not None}


def build(settings: BuildSettings, progress: Progress) -> Built:
    """Write the typed model, build it in a child process, read it back and audit it.

    Raises what loading, planning, calibrating and building raise; UsageError for options that contradict.
    """
    refuse_settings(settings)
    out = output_file(settings.out, settings.model)
    planned = None
    if settings.planned:
        planned = plan_on(settings.model, choose_plan(settings.plan, settings.format))
    model = planned.model if planned else load_model(settings.model)
    feeds = open_feeds(settings.data, model.inputs, settings.limit) if settings.data is not None else None
    job = Job(settings, out, model, planned, feeds, profiles_for(model.inputs, settings.shapes, feeds))
    with tempfile.TemporaryDirectory(prefix="trtdiag-typed-") as scratch:
        return _build(job, Path(scratch), progress)


def _build(job: Job, scratch: Path, progress: Progress) -> Built:
    settings, onnx_path = job.settings, scratch / "model.onnx"
    source = write_source(job, onnx_path, scratch, progress)
    progress.start(f"building with {settings.engine}", None)
    result, target = _run(job, onnx_path, source)
    if job.planned is not None:
        request = request_for_plan(job.planned, source.formats, result.log_path)
    else:
        types = complete(shapes.infer(job.model), job.model)
        request = request_for_model(job.model, types, result.log_path)
    facts = tuple(audit(result.kernels, request))
    notes = (*source.notes, *result.notes)
    return Built(settings, result, target, request, facts, job.profiles, notes, source.table)


def _run(job: Job, onnx_path: Path, source: Source) -> tuple[BuildResult, str]:
    """Build; the result, and what it was built for."""
    options, settings = _options(job, source), job.settings
    if settings.engine == "tensorrt":
        result = build_tensorrt(onnx_path, job.out, options=options, identity=source.identity)
        return result, next((gpu.name for gpu in find_gpus()), "")
    target = settings.compute_capability or default_target()
    result = build_rtx(
        onnx_path, job.out, compute_capability=target, options=options, identity=source.identity
    )
    return result, target


def default_target() -> str:
    """The GPU that is here, if TensorRT-RTX runs on it; else SM89."""
    return CURRENT if any(runs_rtx(gpu.compute_capability) for gpu in find_gpus()) else DEFAULT_TARGET


def _options(job: Job, source: Source) -> BuildOptions:
    settings = job.settings
    flags = (("VERSION_COMPATIBLE", settings.version_compatible), ("REFIT", settings.refit))
    return BuildOptions(
        profiles=job.profiles,
        tf32=settings.tf32,
        opt_level=settings.opt_level,
        workspace_bytes=None if settings.workspace_mb is None else settings.workspace_mb << 20,
        flags=tuple(name for name, wanted in flags if wanted),
        timing_cache=_timing_cache(settings, job.out),
        weak=source.weak,
        timeout_s=settings.timeout_s,
    )


def _timing_cache(settings: BuildSettings, out: Path) -> Path | None:
    if settings.engine != "tensorrt" or not settings.use_timing_cache:
        return None
    return output_file(settings.timing_cache) if settings.timing_cache else out.with_name(TIMING_CACHE)
