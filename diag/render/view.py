"""Report to plain view data: everything a page shows, decided here and only placed by the template."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from diag.render.cards import BirthCard, FindingCard, birth_cards, finding_cards
from diag.render.cells import Fact, Table, count, duration, is_broken, memory, sqnr_of, with_unit
from diag.render.drift_groups import percent
from diag.render.drift_view import DriftView, drift_view
from diag.render.pareto import Pareto, pareto
from diag.render.picture import Picture, picture
from diag.render.tables import (
    checks_table,
    glossary_table,
    kernels_table,
    layers_table,
    outputs_table,
    pins_table,
)
from diag.report.drift import Drift
from diag.report.schema import OutputInfo, ReferenceTrust, Report


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: `tone` is ok, bad, warn or plain, and never the only carrier of the meaning."""

    tone: str
    label: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Group:
    kind: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    headline: Headline
    warnings: tuple[str, ...]
    tiles: tuple[Fact, ...]
    ran: tuple[Fact, ...]
    pins: Table | None
    groups: tuple[Group, ...]
    groups_title: str
    outputs: Table
    pareto: Pareto | None
    picture: Picture | None
    births: tuple[BirthCard, ...]
    findings: tuple[FindingCard, ...]
    layers: Table
    kernels: Table | None
    checks: Table | None
    run: tuple[Fact, ...]
    glossary: Table
    drift: DriftView | None
    compared: bool
    """Whether outputs and layers were compared: drift alone, or what a file holds, is none."""


def page(report: Report) -> Page:
    """Everything that the HTML page shows."""
    lead = headline(report)
    groups = tuple(Group(g.kind, tuple(g.layers)) for g in (report.plan.groups if report.plan else []))
    return Page(
        title=f"{lead.label}: {model_name(report)}",
        headline=lead,
        warnings=warnings(report),
        tiles=_tiles(report),
        ran=_ran(report),
        pins=pins_table(report),
        groups=groups,
        groups_title=f"{count(len(groups), 'group')} of layers changed precision together",
        outputs=outputs_table(report),
        pareto=pareto(report.search),
        picture=picture(report),
        births=birth_cards(report),
        findings=finding_cards(report),
        layers=layers_table(report),
        kernels=kernels_table(report),
        checks=checks_table(report),
        run=_run(report),
        glossary=glossary_table(),
        drift=drift_view(report.drift) if report.drift else None,
        compared=not read_only(report) and (report.drift is None or bool(report.layers or report.outputs)),
    )


def model_name(report: Report) -> str:
    """The model's file name."""
    return report.model.path.replace("\\", "/").rsplit("/", 1)[-1] or "model"


def headline(report: Report) -> Headline:
    """The verdict with its tone. Without a gate nothing is called a pass."""
    sentence = report.verdict or _sentence(report)
    if report.gate is not None:
        return Headline(*(("ok", "Pass") if report.gate.passed else ("bad", "Fail")), sentence)
    if report.drift is not None:
        words = {"ok": ("ok", "No drift"), "warn": ("warn", "Look closer"), "fail": ("bad", "Drift")}
        level = "warn" if report.findings and report.drift.level == "ok" else report.drift.level
        return Headline(*words[level], sentence)
    if read_only(report):
        severities = {finding.severity for finding in report.findings}
        worst = next((name for name in ("error", "warning") if name in severities), "")
        words = {
            "error": ("bad", "Errors"),
            "warning": ("warn", "Look closer"),
            "": ("plain", "Nothing found"),
        }
        return Headline(*words[worst], sentence)
    broken = any(is_broken(output.metrics) for output in report.outputs)
    if broken or any(finding.severity == "error" for finding in report.findings):
        return Headline("bad", "Damaged", sentence)
    if warnings(report) or any(birth.reaches_output for birth in report.births):
        return Headline("warn", "Look closer", sentence)
    return Headline("plain", "Measured", sentence)


def read_only(report: Report) -> bool:
    """Whether a report is about what a model, an engine or a file holds: nothing in it was compared."""
    compared = any(layer.status == "compared" for layer in report.layers)
    nothing_done = not (report.outputs or compared or report.drift)
    return nothing_done and bool(report.findings or report.verdict)


def _sentence(report: Report) -> str:
    """A verdict for reports that carry none."""
    worst = worst_output(report)
    if worst is None:
        return "No output was compared."
    sqnr_db = sqnr_of(worst.metrics)
    value = "unknown" if sqnr_db is None else with_unit("sqnr_db", sqnr_db)
    return f"The worst of {count(len(report.outputs), 'output')} is {worst.name}: SQNR {value}."


def worst_output(report: Report) -> OutputInfo | None:
    """The output with the smallest SQNR; what is not finite is worse than any number."""

    def goodness(output: OutputInfo) -> float:
        sqnr_db = sqnr_of(output.metrics)
        if sqnr_db is None or is_broken(output.metrics):
            return -math.inf if is_broken(output.metrics) else math.inf
        return sqnr_db

    return min(report.outputs, key=goodness, default=None)


def warnings(report: Report) -> tuple[str, ...]:
    """What a reader must know before believing any number."""
    found = []
    if report.run.random_data:
        found.append("Random data: these inputs are noise, so the numbers prove little about real use.")
    trust = report.run.reference
    if trust is not None and not trust.trusted:
        found.append(
            f"The FP32 reference is not stable ({_trust_numbers(trust)}): errors below that mean nothing."
        )
    if trust is not None and trust.nonfinite_tensors:
        tensors = count(len(trust.nonfinite_tensors), "tensor")
        names = ", ".join(trust.nonfinite_tensors[:3])
        found.append(
            f"The FP32 reference itself is not finite in {tensors} ({names}); those parts are left out."
        )
    return tuple(found)


def _trust_numbers(trust: ReferenceTrust) -> str:
    return (
        f"relative L2 {trust.optimisation_rel_l2:.2g} between optimisation levels, "
        f"{trust.jitter_rel_l2:.2g} under a jitter of one rounding, tolerance {trust.tolerance_rel_l2:.2g}"
    )


def _tiles(report: Report) -> tuple[Fact, ...]:
    if report.drift is not None:
        return _drift_tiles(report.drift)
    worst = worst_output(report)
    tiles = []
    if worst is not None:
        sqnr_db = sqnr_of(worst.metrics)
        text = "not finite" if is_broken(worst.metrics) or sqnr_db is None else with_unit("sqnr_db", sqnr_db)
        tiles.append(Fact(f"worst output, {worst.name}", text))
    if read_only(report):
        counts = Counter(finding.severity for finding in report.findings)
        return tuple(Fact(f"{name}s", f"{counts[name]:,}") for name in ("error", "warning", "note"))
    compared = sum(layer.status == "compared" for layer in report.layers)
    reaching = sum(birth.reaches_output for birth in report.births)
    errors = sum(finding.severity == "error" for finding in report.findings)
    return (
        *tiles,
        Fact("layers compared", f"{compared:,} of {len(report.layers):,}"),
        Fact("places where error begins", f"{reaching:,} of {len(report.births):,} reach an output"),
        Fact("findings", f"{len(report.findings):,}" + (f" ({count(errors, 'error')})" if errors else "")),
    )


def _drift_tiles(drift: Drift) -> tuple[Fact, ...]:
    loss = max((tensor.figures["sqnr_loss_db"].value for tensor in drift.tensors), default=0.0)
    share = max((tensor.figures["saturation"].value for tensor in drift.tensors), default=0.0)
    drifting = sum(tensor.level == "fail" for tensor in drift.tensors)
    return (
        Fact("tensors that drift", f"{drifting:,} of {len(drift.tensors):,}"),
        Fact("largest loss of SQNR", f"{max(loss, 0.0):.1f} dB"),
        Fact("largest clipped share", f"{percent(share)} %"),
        Fact("production requests", f"{drift.production_requests:,}"),
    )


def _ran(report: Report) -> tuple[Fact, ...]:
    run, model, plan = report.run, report.model, report.plan
    samples = f"{count(run.samples, 'sample')} in {count(run.batches, 'batch', 'batches')}"
    facts = [
        Fact("Model", f"{model.path} (opset {model.opset}, {count(model.node_count, 'node')})"),
        Fact("Plan", plan_text(report) if plan else "none: the model as it is"),
        Fact("Engine", run.engine),
        Fact("Data", f"{run.data or 'not said'}; {samples}", "warn" if run.random_data else ""),
    ]
    if run.calibration:
        facts.append(Fact("Calibration", run.calibration))
    if report.drift is not None and not report.outputs:
        return tuple(fact for fact in facts if fact.name in ("Data", "Calibration", "Model"))
    return (*facts, _reference(run.reference))


def plan_text(report: Report) -> str:
    """The plan in a few words."""
    plan = report.plan
    if plan is None:
        return "no plan"
    return f"{plan.default} by default, {plan.base} elsewhere, {count(len(plan.pins), 'pin')}"


def _reference(trust: ReferenceTrust | None) -> Fact:
    if trust is None:
        return Fact("Reference", "FP32; its stability was not tested")
    word = "stable" if trust.trusted else "NOT stable"
    return Fact("Reference", f"FP32, {word}: {_trust_numbers(trust)}", "" if trust.trusted else "bad")


def _run(report: Report) -> tuple[Fact, ...]:
    run = report.run
    facts = [
        Fact("Command", run.command, "code"),
        Fact("Started", run.started),
        Fact("Took", duration(run.seconds)),
        Fact("Peak memory", memory(run.peak_memory_mb)),
        Fact("Flags", _listed(run.flags) or "none"),
        Fact("Versions", _listed(run.versions)),
    ]
    if run.seed is not None:
        facts.append(Fact("Random seed", str(run.seed)))
    facts.append(Fact("Model SHA-256", report.model.sha256, "code"))
    if report.plan is not None:
        facts.append(Fact("Plan SHA-256", report.plan.sha256, "code"))
    return tuple(facts)


def _listed(items: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in items.items())
