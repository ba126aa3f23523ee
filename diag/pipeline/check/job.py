"""Hazards of a model before anything is built: rules on its graph, and on ranges where there are data."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from diag.calibration.extremes import measure_extremes
from diag.engines import onnxruntime as ort_engine
from diag.errors import UsageError
from diag.feeds import Feeds, open_feeds
from diag.files import output_folder, write_texts
from diag.lint.constants import check_constants
from diag.lint.guards import check_guards
from diag.lint.hazard import Hazard, lint_rules, worst_first
from diag.lint.lowered import Extremes, Lowered
from diag.lint.operands import check_activations, check_weights
from diag.lint.qdq import check_qdq
from diag.lint.ranges import check_inputs, check_ranges, check_unmeasured
from diag.numerics.formats import FORMATS
from diag.pipeline.check.hazards import findings_from
from diag.pipeline.compare.findings import mending_pins
from diag.pipeline.compare.run import batch_size
from diag.pipeline.inspect.report import model_info_of, run_info
from diag.pipeline.prepare import Planned, choose_plan, plan_on
from diag.plan.schema import pin_for, plan_for_format, plan_sha256, plan_to_yaml
from diag.progress import Progress
from diag.render.html import render_html
from diag.report.io import checked_text
from diag.report.schema import Check, Finding, GateResult, PlanInfo, Report
from diag.roles import norm_parts
from diag.typed.apply import operands_of
from diag.typed.brought import Quantizer, find_quantizers

MEND_FILE = "mend.yaml"
_HALF = frozenset({"fp16", "bf16"})


@dataclass(frozen=True)
class CheckSettings:
    """Options of `trtdiag check`, in its terms."""

    model: str
    out: str
    plan: str | None = None
    format: str | None = None
    """Without plan and format: FP16 for a float model, the quantizers alone for a Q/DQ model."""
    data: str | None = None
    limit: int | None = None
    strict: bool = False
    command: str = "trtdiag check"


def check(settings: CheckSettings, progress: Progress) -> Report:
    """Look for hazards and write report.json, report.html and, where a finding has pins, mend.yaml.

    Raises ModelError, PlanError, DataError and UsageError as their makers do.
    """
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if settings.limit is not None and settings.data is None:
        raise UsageError("--limit counts batches of data", "Give --data too, or leave it out.")
    out = output_folder(settings.out)
    progress.start("reading the model", None)
    planned, quantizers = _planned(settings)
    feeds = open_feeds(settings.data, planned.model.inputs, settings.limit) if settings.data else None
    measured, samples = _measured(planned, feeds, progress) if feeds is not None else ({}, 0)
    progress.start("applying the rules", None)
    hazards = _hazards(planned, quantizers, measured)
    report = _report(settings, planned, feeds, findings_from(hazards), quantizers)
    report.run.started, report.run.seconds, report.run.samples = started, time.monotonic() - began, samples
    pins = mending_pins(report.findings)
    texts = {out / "report.html": render_html(report)}
    if pins:
        added = tuple(pin_for(pin.target, pin.format, pin.reason) for pin in pins.values())
        plan = planned.plan.model_copy(update={"pins": (*planned.plan.pins, *added)})
        texts[out / MEND_FILE] = plan_to_yaml(plan)
    texts[out / "report.json"] = checked_text(report, repr(str(out / "report.json")))
    write_texts(texts)
    return report


def _planned(settings: CheckSettings) -> tuple[Planned, tuple[Quantizer, ...]]:
    """The model under the plan that was asked for, and the quantizers that it brings."""
    asked = settings.plan is not None or settings.format is not None
    plan = choose_plan(settings.plan, settings.format) if asked else plan_for_format("fp16")
    planned = plan_on(settings.model, plan)
    quantizers = find_quantizers(planned.model)
    if quantizers and not asked:
        planned = planned.with_plan(plan_for_format("fp32"))
    return planned, quantizers


def _measured(planned: Planned, feeds: Feeds, progress: Progress) -> tuple[dict[str, Extremes], int]:
    """Extremes of the float tensors that depend on the inputs, and the number of samples."""
    model = planned.model
    names = [*model.inputs, *(name for layer in model.layers for name in layer.outputs)]
    floats = {name for name, info in planned.types.items() if info.is_float}
    wanted = [name for name in names if name in model.value_dependent and name in floats]
    progress.start("measuring ranges in FP32", len(feeds))
    sizes: list[int] = []

    def counted() -> Iterator[Mapping[str, NDArray[Any]]]:
        for batch in feeds:
            sizes.append(batch_size(batch))
            yield batch

    found = measure_extremes(model, wanted, counted(), lint_rules().mask_magnitude, progress)
    return found, sum(sizes)


def _hazards(
    planned: Planned, quantizers: Sequence[Quantizer], measured: Mapping[str, Extremes]
) -> list[Hazard]:
    model, formats = planned.model, planned.resolved.formats
    lowered = Lowered(model, _floats(planned))
    roles = {name: role.name for name, role in planned.roles.items()}
    found = check_qdq(model, quantizers, planned.types)
    found += check_constants(lowered, planned.plan.constants.out_of_range)
    found += check_guards(lowered, measured)
    quantized = {layer: fmt for layer, fmt in formats.items() if FORMATS[fmt].quantized}
    operands = operands_of(model, quantized, planned.types)
    found += [*check_weights(operands, formats), *check_activations(operands, formats, measured)]
    if measured:
        found += [*check_ranges(lowered, roles, measured), *check_inputs(lowered, measured)]
        found += _not_finite(planned, measured)
    else:
        found += check_unmeasured(lowered, norm_parts(model))
    return worst_first(found)


def _floats(planned: Planned) -> dict[str, str]:
    """The 16-bit format of each layer that computes in one; beside its codes a layer has the base."""
    formats = {
        name: planned.plan.base if FORMATS[fmt].quantized else fmt
        for name, fmt in planned.resolved.formats.items()
    }
    return {name: fmt for name, fmt in formats.items() if fmt in _HALF}


def _not_finite(planned: Planned, measured: Mapping[str, Extremes]) -> list[Hazard]:
    broken = [x.id for x in planned.model.layers if any(measured[n].nan for n in x.outputs if n in measured)]
    if not broken:
        return []
    title = f"the FP32 reference holds NaN in {len(broken)} layers, first {broken[0]}"
    mend = "Check model and data in FP32 first."
    return [Hazard("reference-nan", "reference-trust", "error", tuple(broken), title, mend)]


def _report(
    settings: CheckSettings,
    planned: Planned,
    feeds: Feeds | None,
    findings: list[Finding],
    quantizers: Sequence[Quantizer],
) -> Report:
    run = run_info(None, settings.model, settings.command)
    run.engine = "rules on the graph; nothing was run"
    if feeds is not None:
        run.engine = f"rules on the graph, and ranges in FP32 by ONNX Runtime {ort_engine.version()}"
        run.data, run.random_data, run.seed, run.batches = feeds.label, feeds.random, feeds.seed, len(feeds)
    plan = planned.plan
    return Report(
        schema="trtdiag.report/1",
        model=model_info_of(planned.model),
        plan=PlanInfo(default=plan.default, base=plan.base, sha256=plan_sha256(plan)),
        run=run,
        verdict=_verdict(planned, findings, quantizers, feeds is not None),
        findings=findings,
        gate=_gate(findings) if settings.strict else None,
    )


def _verdict(
    planned: Planned, findings: Sequence[Finding], quantizers: Sequence[Quantizer], measured: bool
) -> str:
    counts = Counter(finding.severity for finding in findings)
    plural = {name: f"{number} {name}{'s' if number != 1 else ''}" for name, number in counts.items()}
    said = ", ".join(plural[name] for name in ("error", "warning") if name in plural)
    worst = f": {findings[0].title}" if findings and findings[0].severity != "note" else ""
    of = planned.plan.default.upper()
    if quantizers:
        of = f"{len(quantizers)} quantizers" + ("" if of == "FP32" else f" and {of}")
    how = "" if measured else ", by rules alone"
    return f"{of}{how}: {said or 'no hazard found'}{worst}."


def _gate(findings: Sequence[Finding]) -> GateResult:
    """What `--strict` asks for: no error and no warning."""
    wrong = sum(finding.severity != "note" for finding in findings)
    bound = Check(name="errors and warnings", value=float(wrong), bound=0.0, passed=not wrong)
    return GateResult(passed=not wrong, checks=[bound])
