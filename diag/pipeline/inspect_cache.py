"""What a calibration cache of TensorRT 10 and older holds: its header, its scales, and what looks wrong."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from diag.engines.scale_cache import ScaleCache, read_scale_cache
from diag.model.graph import Model
from diag.report.schema import Finding, Mend
from diag.typed.operands import LINEAR_OPS

KIND = "scale-stale-or-missing"

_UNITS = tuple(struct.unpack("!f", bytes.fromhex(text))[0] for text in ("3c010204", "3c010a14"))
"""A range of 1: 1/127 in float32, and what TensorRT's entropy calibrator makes of it, (1 + 2^-12)/127."""
_SHARED_WARNING = 0.2
_COVERAGE_WARNING = 0.95
_SHOWN = 3


def inspect_cache(path: str | Path, model: Model | None) -> tuple[ScaleCache, list[Finding]]:
    """Read a cache and look for placeholders, broken scales and tensors that it lacks. Raises TableError."""
    cache = read_scale_cache(path)
    found = [*_broken(cache), *_placeholders(cache), *_shared(cache)]
    if model is not None:
        found += _coverage(cache, model)
    order = ("error", "warning", "note")
    return cache, sorted(found, key=lambda finding: order.index(finding.severity))


def cache_verdict(cache: ScaleCache, findings: Sequence[Finding]) -> str:
    """One sentence on a cache."""
    worst = f"; {findings[0].title}" if findings and findings[0].severity != "note" else ""
    wrote = f"TensorRT {cache.version}, {cache.algorithm}"
    return f"Calibration cache of {wrote}, with {len(cache.scales)} scales{worst}."


def _broken(cache: ScaleCache) -> list[Finding]:
    infinite = [name for name, scale in cache.scales.items() if math.isinf(scale)]
    unusable = [n for n, scale in cache.scales.items() if math.isnan(scale) or scale <= 0]
    found = []
    if unusable:
        found.append(
            _finding("unusable", "error", f"{len(unusable)} scales are zero, negative or NaN", unusable)
        )
    if infinite:
        title = f"{len(infinite)} scales are infinite, so their tensors quantize to zero"
        found.append(_finding("infinite", "warning", title, infinite))
    return found


def _placeholders(cache: ScaleCache) -> list[Finding]:
    """Scales that nobody measured: a range of exactly 1, or a step of exactly 1."""
    found = []
    for values, said in ((_UNITS, "1/127 (a range of 1)"), ((1.0,), "1")):
        names = [name for name, scale in cache.scales.items() if scale in values]
        if names:
            severity = "warning" if len(names) > _SHARED_WARNING * len(cache.scales) else "note"
            title = f"{len(names)} of {len(cache.scales)} scales are {said}, as placeholders are"
            found.append(_finding(f"placeholder-{values[0]:.3g}", severity, title, names))
    return found


def _shared(cache: ScaleCache) -> list[Finding]:
    finite = Counter(scale for scale in cache.scales.values() if math.isfinite(scale))
    if not finite:
        return []
    value, number = finite.most_common(1)[0]
    if number < 2 or number <= _SHARED_WARNING * len(cache.scales) or value in (*_UNITS, 1.0):
        return []
    names = [name for name, scale in cache.scales.items() if scale == value]
    whole = number == len(cache.scales)
    title = f"{'all' if whole else number} scales are the same, {value:.6g}: they were not measured"
    return [_finding("all-equal" if whole else "shared", "error" if whole else "warning", title, names)]


def _coverage(cache: ScaleCache, model: Model) -> list[Finding]:
    """Tensors that the model's multiplying layers read, and that have no scale."""
    needed = [
        name
        for layer in model.layers
        if layer.op_type in LINEAR_OPS
        for name in layer.reads
        if name in model.value_dependent
    ]
    needed = list(dict.fromkeys(needed))
    missing = [name for name in needed if name not in cache.scales]
    if not needed or not missing:
        return []
    share = 1 - len(missing) / len(needed)
    severity = "note" if share >= _COVERAGE_WARNING else "warning"
    title = f"{len(missing)} of {len(needed)} tensors that the model multiplies have no scale"
    return [_finding("coverage", severity, title, missing, share=share)]


def _finding(name: str, severity: str, title: str, tensors: Sequence[str], **evidence: float) -> Finding:
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
