"""Production against calibration: which tensors drift, where, since when, at what cost, and what to do."""

from __future__ import annotations

import datetime
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import diag
from diag.drift.compare import Compared, compare, histogram_edges, tensor_report
from diag.drift.merge import merge
from diag.drift.requests import requests_needed
from diag.drift.rules import DriftRules, drift_rules
from diag.drift.stats import Stats
from diag.errors import UsageError
from diag.files import output_folder, write_texts
from diag.model.graph import Model
from diag.model.load import load_model
from diag.pipeline.drift_advice import Advisor
from diag.pipeline.drift_costs import Costs, measure_costs
from diag.pipeline.drift_findings import findings_of, verdict_sentence
from diag.pipeline.drift_settings import DriftSettings
from diag.pipeline.drift_sources import Sources, open_sources
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
    compared: Compared
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
    compared = compare(sources.sides, sources.production_sides(sources.production), rules)
    if not compared.pairs:
        raise UsageError("the two sides hold no tensor in common", "Profile with --calibration TABLE.")
    job = Job(settings, sources, compared, rules, model, _producers(sources, model))
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
    return measure_costs(job.settings, job.sources, job.compared, job.model, job.rules.costly_db, progress)


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
    sources, compared = job.sources, job.compared
    edges = histogram_edges(compared.pairs.values())
    timeline = _timeline(job)
    return Drift(
        level=compared.verdict.level,
        calibration=sources.calibration.words,
        production=sources.words,
        calibration_requests=sources.calibration.requests,
        production_requests=sources.production.source.requests,
        cause=compared.verdict.cause,
        consequences=list(compared.verdict.consequences),
        histogram_edges=edges.tolist(),
        tensors=[
            tensor_report(j, compared.pairs[j.name], job.producers.get(j.name, ""), edges)
            for j in compared.judged
        ],
        slices=_slices(job),
        worst_requests=_worst_requests(job),
        timeline=timeline,
        began=_began(timeline),
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
    return Advisor(job.sources, job.compared, job.settings, job.rules, readers)


def _slices(job: Job) -> list[DriftSlice]:
    groups: dict[str, list[Stats]] = {}
    for group in job.sources.groups:
        if group.slice:
            groups.setdefault(group.slice, []).append(group.stats)
    return [_slice(job, name, _merged(parts)) for name, parts in groups.items()]


def _slice(job: Job, name: str, stats: Stats) -> DriftSlice:
    found = _judge(job, stats)
    if found is None:
        return DriftSlice(
            name=name,
            requests=stats.source.requests,
            level="ok",
            judged=False,
            worst_sqnr_loss_db=0.0,
            worst_saturation=0.0,
        )
    needed = [
        requests_needed(side.requests.absmax.tolist(), job.rules.range_within) if side.requests else None
        for side in (found.pairs[tensor][1] for tensor in found.drifting)
    ]
    known = [number for number in needed if number is not None]
    return DriftSlice(
        name=name,
        requests=stats.source.requests,
        level=found.verdict.level,
        cause=found.verdict.cause,
        drifting=len(found.drifting),
        worst_sqnr_loss_db=found.worst_loss_db,
        worst_saturation=found.worst_saturation,
        requests_needed=max(known) if known and len(known) == len(needed) else None,
    )


def _judge(job: Job, stats: Stats) -> Compared | None:
    """A part of production judged on its own; None when it holds too few requests."""
    if stats.source.requests < job.rules.least_requests:
        return None
    return compare(job.sources.sides, job.sources.production_sides(stats), job.rules)


def _timeline(job: Job) -> list[DriftDay]:
    days: dict[str, list[Stats]] = {}
    for group in job.sources.groups:
        if group.date:
            days.setdefault(group.date, []).append(group.stats)
    return [_day(job, date, _merged(parts)) for date, parts in sorted(days.items())]


def _day(job: Job, date: str, stats: Stats) -> DriftDay:
    found, requests = _judge(job, stats), stats.source.requests
    if found is None:
        return DriftDay(
            date=date,
            requests=requests,
            level="ok",
            judged=False,
            worst_sqnr_loss_db=0.0,
            worst_saturation=0.0,
        )
    return DriftDay(
        date=date,
        requests=requests,
        level=found.verdict.level,
        cause=found.verdict.cause,
        drifting=len(found.drifting),
        worst_sqnr_loss_db=found.worst_loss_db,
        worst_saturation=found.worst_saturation,
    )


def _merged(parts: list[Stats]) -> Stats:
    return parts[0] if len(parts) == 1 else merge(parts)


def _began(timeline: list[DriftDay]) -> str | None:
    """The first date from which every judged date drifts."""
    began = None
    for day in reversed([day for day in timeline if day.judged]):
        if day.level != "fail":
            break
        began = day.date
    return began


def _worst_requests(job: Job) -> list[DriftRequest]:
    """Requests with the largest error in a drifting tensor, each named once, in the tensor it is worst in."""
    found: dict[str, DriftRequest] = {}
    for group in job.sources.groups:
        for name in job.compared.drifting:
            for label, ratio in group.stats[name].worst:
                worse = label not in found or ratio > found[label].noise_ratio
                if worse and ratio > 0:
                    found[label] = DriftRequest(
                        request=label, slice=group.slice, tensor=name, noise_ratio=ratio
                    )
    return sorted(found.values(), key=lambda r: -r.noise_ratio)[:WORST_REQUESTS]


def _write(report: Report, job: Job, out: Path) -> None:
    plan = _advisor(job).pinned_plan() if job.model is not None else None
    texts = {out / "report.html": render_html(report)}
    if plan is not None:
        texts[out / PINNED_FILE] = plan
    texts[out / "report.json"] = checked_text(report, repr(str(out / "report.json")))
    write_texts(texts)
