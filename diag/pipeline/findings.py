"""What a comparison found, in words, with the plan that would mend it. Suggestions, not verdicts:
`responsible` stays null until lowering or raising only these layers was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diag.model.graph import Model
from diag.numerics.formats import FORMATS
from diag.report.schema import Birth, Finding, LayerInfo, Mend, PinInfo, ReferenceTrust

_SQUARES = frozenset({"Pow", "Mul", "ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare"})


@dataclass(frozen=True)
class Evidence:
    """What findings are made from."""

    model: Model
    layers: Sequence[LayerInfo]
    births: Sequence[Birth]
    base: str
    threshold_db: float


def find(evidence: Evidence, trust: ReferenceTrust) -> list[Finding]:
    """Findings, best first: broken reference, overflow, layers with a large error of their own."""
    return [*_reference(trust), *_overflow(evidence), *_sensitive(evidence)]


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


def _overflow(evidence: Evidence) -> list[Finding]:
    """One finding for each kind of layer whose own arithmetic leaves the format's range."""
    by_kind: dict[str, list[LayerInfo]] = {}
    overflowing: set[str] = set()
    for layer in evidence.layers:
        if layer.local.get("nonfinite", 0) > 0 and layer.format != "fp32":
            # A layer that only receives what another could not hold is not to blame.
            if overflowing.isdisjoint(evidence.model.layer_by_id[layer.id].reads):
                by_kind.setdefault(overflow_kind(layer), []).append(layer)
            overflowing.update(layer.outputs)
    reaching = {b.layer for b in evidence.births if b.reaches_output}
    found = []
    for kind, layers in by_kind.items():
        harmful = any(layer.name in reaching for layer in layers)
        found.append(_overflow_finding(kind, layers, harmful))
    return sorted(found, key=lambda f: f.severity != "error")


def overflow_kind(layer: LayerInfo) -> str:
    """Name of the fault, from what the layer is for."""
    if layer.role == "norm" and layer.op_type in _SQUARES:
        return "norm-square-overflow"
    if layer.role == "attn_mask":
        return "mask-constant"
    if layer.op_type in ("Exp", "Log", "Softplus"):
        return "exp-log-domain"
    if layer.op_type.startswith("Reduce") or layer.op_type == "GlobalAveragePool":
        return "reduction-accumulation"
    return "activation-overflow"


def _overflow_finding(kind: str, layers: Sequence[LayerInfo], harmful: bool) -> Finding:
    first = layers[0]
    limit = FORMATS[first.format].max
    largest = max(layer.local.get("reference_absmax", 0.0) for layer in layers)
    what = "the square inside a norm" if kind == "norm-square-overflow" else first.op_type
    many = f" and {len(layers) - 1} more like it" if len(layers) > 1 else ""
    return Finding(
        id=kind,
        kind=kind,
        severity="error" if harmful else "note",
        layers=[layer.name for layer in layers],
        title=f"{what} leaves the {first.format.upper()} range at {first.name}{many}",
        evidence={
            "layers": len(layers),
            "reference_absmax": largest,
            "format_max": limit,
            "nonfinite_elements": sum(layer.local["nonfinite"] for layer in layers),
        },
        mend=Mend(
            text="Keep these layers in FP32." if harmful else "The damage heals before any output: leave it.",
            pins=[_pin(layer, "fp32", f"measured: {kind}") for layer in layers] if harmful else [],
        ),
    )


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
                pins=[_pin(layer, fmt, f"local SQNR {layer.local['sqnr_db']:.1f} dB") for layer in bad],
            ),
        )
    ]


def _pin(layer: LayerInfo, fmt: str, reason: str) -> PinInfo:
    return PinInfo(target=layer.name, format=fmt, reason=reason, layers=1)


def mending_pins(findings: Sequence[Finding]) -> Mapping[str, PinInfo]:
    """Pins that the findings ask for, by layer name, the first reason kept."""
    pins: dict[str, PinInfo] = {}
    for finding in findings:
        for pin in finding.mend.pins:
            pins.setdefault(pin.target, pin)
    return pins
