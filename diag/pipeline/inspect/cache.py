"""What a calibration cache of TensorRT 10 and older holds: its header, its scales, and what looks wrong."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from diag.calibration.cache_names import CacheNames, match_names
from diag.calibration.scale_rules import scale_rules
from diag.engines.scale_cache import ScaleCache, read_scale_cache
from diag.model.graph import LINEAR_OPS, Model
from diag.report.schema import Finding, Mend

KIND = "scale-stale-or-missing"

_UNITS = tuple(struct.unpack("!f", bytes.fromhex(text))[0] for text in ("3c010204", "3c010a14"))
"""A range of 1: 1/127 in float32, and what TensorRT's entropy calibrator makes of it, (1 + 2^-12)/127."""
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_SHOWN = 3


def inspect_cache(path: str | Path, model: Model | None) -> tuple[ScaleCache, list[Finding]]:
    """Read a cache and look for placeholders, broken scales and tensors that it lacks. Raises TableError."""
    cache = read_scale_cache(path)
    if model is None:
        return cache, worst_first([*_broken(cache), *_placeholders(cache), *_shared(cache)])
    needed = [
        name
        for layer in model.layers
        if layer.op_type in LINEAR_OPS
        for name in layer.reads
        if name in model.value_dependent
    ]
    return cache, judge_cache(cache, match_names(cache.scales, model), needed)


def judge_cache(cache: ScaleCache, names: CacheNames, needed: Collection[str]) -> list[Finding]:
    """What looks wrong in a cache beside a model, worst first; `needed` are tensors that it must cover."""
    found = [*_broken(cache), *_placeholders(cache), *_shared(cache)]
    found += [*_coverage(cache, list(dict.fromkeys(needed))), *_misnamed(names)]
    return worst_first(found)


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes."""
    order = ("error", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def cache_verdict(cache: ScaleCache, findings: Sequence[Finding]) -> str:
    """One sentence on a cache."""
    worst = f"; {findings[0].title}" if findings and findings[0].severity != "note" else ""
    wrote = f"TensorRT {cache.version}, {cache.algorithm}"
    return f"Calibration cache of {wrote}, with {len(cache.scales)} scales{worst}."


def _broken(cache: ScaleCache) -> list[Finding]:
    infinite = [name for name, scale in cache.scales.items() if math.isinf(scale)]
    unusable = [n for n, scale in cache.scales.items() if math.isnan(scale) or scale <= 0]
    denormal = [n for n, scale in cache.scales.items() if 0 < scale < _SMALLEST_NORMAL]
    found = []
    if denormal:
        title = f"{len(denormal)} scales are denormal: an engine may take them for zero"
        found.append(finding_on("denormal", "error", title, denormal))
    if unusable:
        found.append(
            finding_on("unusable", "error", f"{len(unusable)} scales are zero, negative or NaN", unusable)
        )
    if infinite:
        title = f"{len(infinite)} scales are infinite, so their tensors quantize to zero"
        found.append(finding_on("infinite", "warning", title, infinite))
    return found


def _placeholders(cache: ScaleCache) -> list[Finding]:
    """Scales that nobody measured: a range of exactly 1, or a step of exactly 1."""
    found = []
    for values, said in ((_UNITS, "1/127 (a range of 1)"), ((1.0,), "1")):
        names = [name for name, scale in cache.scales.items() if scale in values]
        if names:
            severity = "warning" if len(names) > scale_rules().shared_share * len(cache.scales) else "note"
            title = f"{len(names)} of {len(cache.scales)} scales are {said}, as placeholders are"
            found.append(finding_on(f"placeholder-{values[0]:.3g}", severity, title, names))
    return found


def _shared(cache: ScaleCache) -> list[Finding]:
    finite = Counter(scale for scale in cache.scales.values() if math.isfinite(scale))
    if not finite:
        return []
    value, number = finite.most_common(1)[0]
    if number < 2 or number <= scale_rules().shared_share * len(cache.scales) or value in (*_UNITS, 1.0):
        return []
    names = [name for name, scale in cache.scales.items() if scale == value]
    whole = number == len(cache.scales)
    title = f"{'all' if whole else number} scales are the same, {value:.6g}: they were not measured"
    return [finding_on("all-equal" if whole else "shared", "error" if whole else "warning", title, names)]


def _coverage(cache: ScaleCache, needed: Sequence[str]) -> list[Finding]:
    """Tensors that the model's multiplying layers read, and that have no scale."""
    missing = [name for name in needed if name not in cache.scales]
    if not missing:
        return []
    share = 1 - len(missing) / len(needed)
    severity = "note" if share >= scale_rules().coverage_share else "warning"
    title = f"{len(missing)} of {len(needed)} tensors that the model multiplies have no scale"
    return [finding_on("coverage", severity, title, missing, share=share)]


def _misnamed(names: CacheNames) -> list[Finding]:
    """Entries that are of no use: names that fit nothing, and constants."""
    found = []
    if names.unmatched:
        share = names.fit_share
        severity = "note" if share >= scale_rules().coverage_share else "warning"
        title = f"{len(names.unmatched)} entries fit nothing in the model"
        found.append(finding_on("unmatched", severity, title, names.unmatched, share=share))
    if names.constants:
        title = f"{len(names.constants)} entries are constants, calibrated as if they were activations"
        found.append(finding_on("constants", "note", title, names.constants))
    return found


def finding_on(name: str, severity: str, title: str, tensors: Sequence[str], **evidence: float) -> Finding:
    """A finding on scales: how many tensors it is about, and the first of them."""
    shown = ", ".join(tensors[:_SHOWN]) + (" ..." if len(tensors) > _SHOWN else "")
    return Finding.model_validate(
        {
            "id": f"cache-{name}",
            "kind": KIND,
            "severity": severity,
            "title": title,
            "evidence": {"tensors": len(tensors), "first": shown, **evidence},
            "mend": Mend(text="Calibrate again with this model and real data."),
        }
    )
