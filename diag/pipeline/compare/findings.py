"""What a comparison found, in words, with the plan that would mend it. Suggestions, not verdicts:
`responsible` stays null until lowering or raising only these layers was measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diag.model.graph import Model
from diag.numerics.formats import FORMATS
from diag.pipeline.compare.causes import Cause, Scene
from diag.report.schema import Birth, Finding, LayerInfo, Mend, PinInfo, ReferenceTrust

HEADROOM = 2.0
"""A layer with less than this factor to its format's largest value counts as close to it."""


@dataclass(frozen=True)
class Evidence:
    """What findings are made from."""

    model: Model
    layers: Sequence[LayerInfo]
    births: Sequence[Birth]
    base: str
    threshold_db: float


def find(evidence: Evidence, trust: ReferenceTrust) -> list[Finding]:
    """Findings, best first: broken reference, lost values, layers with a large error of their own, and
    those where errors that are small before become large.
    """
    own = [*_lost(evidence), *_sensitive(evidence)]
    explained = {name for finding in own for name in finding.layers}
    return [*_reference(trust), *own, *_amplified(evidence, explained)]


def _reference(trust: ReferenceTrust) -> list[Finding]:
    found = []
    if trust.nonfinite_tensors:
        names = trust.nonfinite_tensors
        found.append(
            Finding(
                id="reference-nonfinite",
                kind="reference-trust",
                severity="error",
                title=f"The FP32 reference is not finite in {len(names)} tensor(s), first in {names[0]}",
                evidence={"tensors": len(names)},
                mend=Mend(
                    text="Check model and data in FP32 first; the rest is compared where it is finite."
                ),
            )
        )
    if not trust.trusted:
        found.append(
            Finding(
                id="reference-unstable",
                kind="reference-trust",
                severity="error",
                title="The FP32 reference moves under one rounding or another optimisation level",
                evidence={
                    "optimisation_rel_l2": trust.optimisation_rel_l2,
                    "jitter_rel_l2": trust.jitter_rel_l2,
                    "tolerance_rel_l2": trust.tolerance_rel_l2,
                },
                mend=Mend(text="Errors of this size cannot be blamed on a number format."),
            )
        )
    return found


def _lost(evidence: Evidence) -> list[Finding]:
    """One finding for each cause by which layers lose values altogether."""
    scene = Scene(evidence.model, {layer.name: layer for layer in evidence.layers})
    reaching = {b.layer for b in evidence.births if b.reaches_output}
    by_kind: dict[str, list[tuple[LayerInfo, Cause]]] = {}
    for layer in _losing(evidence, reaching):
        cause = scene.cause(layer)
        by_kind.setdefault(cause.kind, []).append((layer, cause))
    for layer in _close(evidence):
        if scene.cause(layer).kind in by_kind:
            by_kind[scene.cause(layer).kind].append((layer, scene.cause(layer)))
    found = []
    for kind, causes in by_kind.items():
        harmful = any(layer.name in reaching for layer, _ in causes)
        found.append(_lost_finding(kind, causes, harmful))
    return sorted(found, key=lambda f: f.severity != "error")


def _close(evidence: Evidence) -> list[LayerInfo]:
    """Layers within a factor of two of the format's range: other data may take them beyond it."""
    return [
        layer
        for layer in evidence.layers
        if layer.format != "fp32"
        and not FORMATS[layer.format].quantized
        and layer.local.get("nonfinite", 0) == 0
        and layer.local.get("reference_absmax", 0.0) * HEADROOM > FORMATS[layer.format].max
    ]


def _losing(evidence: Evidence, reaching: Collection[str]) -> list[LayerInfo]:
    """Layers that lose values on the reference's inputs, or, where none before them does, on their own."""
    found = []
    overflowing: set[str] = set()
    for layer in evidence.layers:
        own = layer.local.get("nonfinite", 0) > 0
        born = layer.name in reaching and layer.accumulated.get("nonfinite", 0) > 0
        if layer.format != "fp32" and (own or born):
            # A layer that only receives what another could not hold is not to blame.
            if overflowing.isdisjoint(evidence.model.layer_by_id[layer.id].reads):
                found.append(layer)
            overflowing.update(layer.outputs)
    return found


def _lost_finding(kind: str, causes: Sequence[tuple[LayerInfo, Cause]], harmful: bool) -> Finding:
    first = causes[0][0]
    layers = list(dict.fromkeys(name for _, cause in causes for name in cause.layers))
    pins = list(dict.fromkeys(name for _, cause in causes for name in cause.pins))
    return Finding(
        id=kind,
        kind=kind,
        severity="error" if harmful else "note",
        layers=layers,
        title=_lost_title(kind, [layer for layer, _ in causes], layers[0]),
        evidence={
            "layers": len(causes),
            "reference_absmax": max(x.local.get("reference_absmax", 0.0) for x, _ in causes),
            "format_max": FORMATS[first.format].max,
            "nonfinite_elements": sum(
                x.local.get("nonfinite", 0) or x.accumulated["nonfinite"] for x, _ in causes
            ),
        },
        mend=Mend(
            text="Keep these layers in FP32." if harmful else "The damage heals before any output: leave it.",
            pins=[_pin(name, "fp32", f"measured: {kind}") for name in pins] if harmful else [],
        ),
    )


def _lost_title(kind: str, layers: Sequence[LayerInfo], born: str) -> str:
    fmt = layers[0].format.upper()
    many = f" and {len(layers) - 1} more like it" if len(layers) > 1 else ""
    if kind == "small-constant":
        return f"a small constant vanishes in {fmt} at {born}, and {layers[0].op_type} divides by 0{many}"
    if kind == "mask-constant":
        return f"a mask's constant is beyond the {fmt} range at {born}{many}"
    what = "the square inside a norm" if kind == "norm-square-overflow" else layers[0].op_type
    return f"{what} leaves the {fmt} range at {born}{many}"


def _sensitive(evidence: Evidence) -> list[Finding]:
    """Lowered layers whose own error, on the reference's inputs, is bad or among the worst."""
    lowered = [
        layer
        for layer in evidence.layers
        if layer.format != "fp32" and layer.local and math.isfinite(layer.local["sqnr_db"])
    ]
    worst = sorted(lowered, key=lambda layer: layer.local["sqnr_db"])
    bad = [layer for layer in worst if layer.local["sqnr_db"] < evidence.threshold_db]
    if not bad:
        return []
    fmt = "fp32" if evidence.base == "fp32" else evidence.base
    roles = sorted({layer.role for layer in bad})
    names = ", ".join(roles[:3]) + (" ..." if len(roles) > 3 else "")
    return [
        Finding(
            id="sensitive-op",
            kind="sensitive-op",
            severity="warning",
            layers=[layer.name for layer in bad],
            title=f"{len(bad)} layer(s) fall below {evidence.threshold_db:g} dB by themselves ({names})",
            evidence={"layers": len(bad), "local_sqnr_db": bad[0].local["sqnr_db"], "worst": bad[0].name},
            mend=Mend(
                text=f"Try them in {fmt.upper()}; a small local error elsewhere can still add up.",
                pins=_sensitive_pins(evidence, bad, fmt),
            ),
        )
    ]


def _amplified(evidence: Evidence, explained: Collection[str]) -> list[Finding]:
    """Births that reach an output and that no layer's own error explains."""
    births = [b for b in evidence.births if b.reaches_output and b.layer not in explained]
    if not births:
        return []
    first = births[0]
    cancels = evidence.model.layer_by_id[first.layer].op_type in ("Add", "Sub")
    return [
        Finding(
            id="amplified-error",
            kind="cancellation" if cancels else "sensitive-op",
            severity="warning",
            layers=[birth.layer for birth in births],
            title=f"Errors that are small before {first.layer} are large behind it "
            f"({first.before:.1f} dB to {first.after:.1f} dB)",
            evidence={"layers": len(births), "before_sqnr_db": first.before, "after_sqnr_db": first.after},
            mend=Mend(
                text="No layer is bad by itself: give those before it a wider format, the last ones first."
            ),
        )
    ]


def _sensitive_pins(evidence: Evidence, layers: Sequence[LayerInfo], fmt: str) -> list[PinInfo]:
    """A float layer is bad by what rounding does to its inputs: those who write them move along."""
    scene = Scene(evidence.model, {layer.name: layer for layer in evidence.layers})
    pins: dict[str, PinInfo] = {}
    for layer in layers:
        names = (layer.name,) if FORMATS[layer.format].quantized else scene.with_producers(layer)
        for name in names:
            pins.setdefault(
                name, _pin(name, fmt, f"local SQNR {layer.local['sqnr_db']:.1f} dB at {layer.name}")
            )
    return list(pins.values())


def _pin(name: str, fmt: str, reason: str) -> PinInfo:
    return PinInfo(target=name, format=fmt, reason=reason, layers=1)


def mending_pins(findings: Sequence[Finding]) -> Mapping[str, PinInfo]:
    """Pins that the findings ask for, by layer name, the first reason kept."""
    pins: dict[str, PinInfo] = {}
    for finding in findings:
        for pin in finding.mend.pins:
            pins.setdefault(pin.target, pin)
    return pins
