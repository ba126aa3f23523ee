"""Production against calibration: which tensors drift, where, since when, at what cost, and what to do."""

from __future__ import annotations

import datetime
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import diag
from diag.drift.compare import histogram_edges, tensor_report
from diag.drift.requests import requests_needed
from diag.drift.rules import DriftRules, drift_rules
from diag.errors import UsageError
from diag.files import output_folder, write_texts
from diag.model.graph import Model
from diag.model.load import load_model
from diag.pipeline.drift.advice import Advisor
from diag.pipeline.drift.costs import Costs, measure_costs
from diag.pipeline.drift.findings import findings_of, verdict_sentence
from diag.pipeline.drift.parts import Focus, Part, began, days_of, focus_of, slices_of
from diag.pipeline.drift.settings import DriftSettings
from diag.pipeline.drift.sources import Sources, open_sources
from diag.progress import Progress
from diag.render.html import render_html
from diag.report.drift import Drift, DriftDay, DriftRequest, DriftSlice
from diag.report.io import checked_text
from diag.report.schema import ModelInfo, Report, RunInfo

WORST_REQUESTS = 12
PINNED_FILE = "pinned.yaml"


@dataclass(frozen=True)
class Job:
    """What one report is made from."""

    settings: DriftSettings
    sources: Sources
    focus: Focus
    slices: tuple[Part, ...]
    days: tuple[Part, ...]
    rules: DriftRules
    model: Model | None
    producers: Mapping[str, str]
    """The layer that makes each tensor; a graph input stands for itself."""


def drift(settings: DriftSettings, progress: Progress) -> Report:
    """Compare, and write report.json and report.html into `settings.out`.

    Raises UsageError, StatsError, TableError and ModelError for bad input, NotEnoughEvidenceError when there
    are too few requests.
    """
    started, begin = datetime.datetime.now(datetime.UTC), time.monotonic()
    _refuse(settings)
    out, rules = output_folder(settings.out), drift_rules()
    progress.start("reading statistics", None)
    sources = open_sources(settings.calibration, settings.production, rules.least_requests)
    model = load_model(settings.model) if settings.model else None
    _refuse_other_model(settings, sources, model)
    progress.start("comparing ranges", None)
    slices, days = slices_of(sources, rules), days_of(sources, rules)
    focus = focus_of(sources, slices, days, rules)
    job = Job(settings, sources, focus, slices, days, rules, model, _producers(sources, model))
    costs = _costs(job, progress)
    report = _report(job, costs, started)
    report.run.seconds = time.monotonic() - begin
    _write(report, job, out)
    return report


def _refuse(settings: DriftSettings) -> None:
    if (settings.data or settings.reference_data) and not settings.model:
        raise UsageError("the cost of drift is measured on a model", "Give --model MODEL beside --data.")
    if settings.reference_data and not settings.data:
        raise UsageError("reference data alone show no cost", "Give production with --data too.")


def _refuse_other_model(settings: DriftSettings, sources: Sources, model: Model | None) -> None:
    if model is not None and model.sha256 != sources.production.model_sha256:
        raise UsageError(
            f"the statistics were made with another model than {settings.model!r}",
            "Give the model that was profiled.",
        )


def _producers(sources: Sources, model: Model | None) -> dict[str, str]:
    found = {t.name: t.name for t in sources.production.tensors if t.kind == "input"}
    for layer in model.layers if model else ():
        found |= dict.fromkeys(layer.outputs, layer.id)
    return found


def _costs(job: Job, progress: Progress) -> Costs:
    if job.model is None or not job.settings.data:
        return Costs()
    return measure_costs(
        job.settings, job.sources, job.focus.compared, job.model, job.rules.costly_db, progress
    )


def _report(job: Job, costs: Costs, started: datetime.datetime) -> Report:
    drift_part = _drift(job, costs)
    source = job.sources.production.source
    return Report(
        schema="trtdiag.report/1",
        model=_model_info(job),
        run=RunInfo(
            command=job.settings.command,
            engine="none: statistics are compared",
            versions={
                "trtdiag": diag.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            data=job.sources.words,
            random_data=bool(source.seeds),
            calibration=job.sources.calibration.words,
            batches=source.batches,
            samples=source.requests,
            seconds=0.0,
            peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            started=started.isoformat(timespec="seconds"),
        ),
        verdict=verdict_sentence(drift_part),
        findings=findings_of(drift_part),
        drift=drift_part,
    )


def _model_info(job: Job) -> ModelInfo:
    sha = job.sources.production.model_sha256
    if job.model is None:
        return ModelInfo(path="model not given", sha256=sha, opset=0, node_count=0)
    return ModelInfo(path=job.model.path, sha256=sha, opset=job.model.opset, node_count=len(job.model.layers))


def _drift(job: Job, costs: Costs) -> Drift:
    sources, compared = job.sources, job.focus.compared
    edges = histogram_edges(compared.pairs.values())
    return Drift(
        level=compared.verdict.level,
        calibration=sources.calibration.words,
        production=sources.words,
        calibration_requests=sources.calibration.requests,
        production_requests=sources.production.source.requests,
        focus=job.focus.name,
        cause=compared.verdict.cause,
        consequences=list(compared.verdict.consequences),
        histogram_edges=edges.tolist(),
        tensors=[
            tensor_report(j, compared.pairs[j.name], job.producers.get(j.name, ""), edges)
            for j in compared.judged
        ],
        slices=[_slice(part, job.rules) for part in job.slices],
        worst_requests=_worst_requests(job),
        timeline=[DriftDay(date=part.name, **_judged(part)) for part in job.days],
        began=began(job.days),
        costs=list(costs.layers),
        costs_agree=costs.agree,
        costs_sentence=costs.sentence,
        advice=_advisor(job).advise(),
    )


def _advisor(job: Job) -> Advisor:
    readers: dict[str, list[str]] = {}
    for layer in job.model.layers if job.model else ():
        for name in layer.reads:
            readers.setdefault(name, []).append(layer.id)
    return Advisor(job.sources, job.focus, job.settings, job.rules, readers)


def _slice(part: Part, rules: DriftRules) -> DriftSlice:
    found, needed = part.compared, None
    if found is not None:
        sides = [found.pairs[tensor][1].requests for tensor in found.drifting]
        numbers = [requests_needed(r.absmax.tolist(), rules.range_within) if r else None for r in sides]
        known = [number for number in numbers if number is not None]
        needed = max(known) if known and len(known) == len(numbers) else None
    return DriftSlice(name=part.name, requests_needed=needed, **_judged(part))


def _judged(part: Part) -> dict[str, Any]:
    """What slices and dates have in common."""
    found = part.compared
    return {
        "requests": part.stats.source.requests,
        "level": part.level,
        "judged": found is not None,
        "cause": found.verdict.cause if found else None,
        "drifting": len(found.drifting) if found else 0,
        "worst_sqnr_loss_db": found.worst_loss_db if found else 0.0,
        "worst_saturation": found.worst_saturation if found else 0.0,
    }


def _worst_requests(job: Job) -> list[DriftRequest]:
    """Requests with the largest error in a drifting tensor, each named once, in the tensor it is worst in."""
    found: dict[str, DriftRequest] = {}
    for group in job.sources.groups:
        for name in job.focus.compared.drifting:
            for label, ratio in group.stats[name].worst:
                worse = label not in found or ratio > found[label].noise_ratio
                if worse and ratio > 0:
                    found[label] = DriftRequest(
                        request=label, slice=group.slice, tensor=name, noise_ratio=ratio
                    )
    return sorted(found.values(), key=lambda r: -r.noise_ratio)[:WORST_REQUESTS]


def _write(report: Report, job: Job, out: Path) -> None:
    assert report.drift is not None
    plan = _advisor(job).pinned_plan(report.drift.advice)
    texts = {out / "report.html": render_html(report)}
    if plan is not None:
        texts[out / PINNED_FILE] = plan
    texts[out / "report.json"] = checked_text(report, repr(str(out / "report.json")))
    write_texts(texts)
