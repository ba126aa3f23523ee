"""What a plan makes of the graph that engines take badly, known before anything runs: attention in two types,
skips that are kept twice, biases beyond their integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from diag.lint.hazard import lint_rules
from diag.pipeline.prepare import Planned
from diag.plan.residual import residual_adds
from diag.report.schema import Finding, Mend
from diag.typed.apply import TypedModel
from diag.typed.bias_range import INT32_MAX, bias_ratios


def structure_findings(planned: Planned, typed: TypedModel) -> list[Finding]:
    """Findings on a plan as applied, errors first."""
    return [*_biases(typed), *_attention(planned, typed)]


def structure_notes(planned: Planned, typed: TypedModel) -> tuple[str, ...]:
    """The same as sentences for whoever builds from the plan, and what costs only time besides."""
    return (*(finding.title for finding in structure_findings(planned, typed)), *_skips(planned))


def _biases(typed: TypedModel) -> Iterator[Finding]:
    ratios = bias_ratios(typed.model)
    limit = INT32_MAX * lint_rules().bias_warning_share
    near = {layer: ratio for layer, ratio in ratios.items() if ratio > limit}
    if not near:
        return
    worst = sorted(near, key=lambda layer: -near[layer])
    beyond = near[worst[0]] > INT32_MAX
    where = f"{worst[0]}{_more(worst)}"
    yield Finding(
        id="bias-range",
        kind="qdq-structure",
        severity="error" if beyond else "warning",
        layers=worst,
        title=f"a bias {'does not fit' if beyond else 'hardly fits'} the 32-bit sums of INT8 at {where}",
        evidence={"bias_in_steps": near[worst[0]], "largest_int32": INT32_MAX, "layers": len(worst)},
        mend=Mend(text="A channel's weights are tiny beside its bias: keep the layer out of INT8."),
    )


def _attention(planned: Planned, typed: TypedModel) -> Iterator[Finding]:
    """Attention is one kernel only when both of its products have one type."""
    pairs = [
        (qk, pv) for qk, pv in attention_pairs(planned) if typed.formats.get(qk) != typed.formats.get(pv)
    ]
    if not pairs:
        return
    kinds = Counter(tuple(typed.formats.get(layer, "fp32") for layer in pair) for pair in pairs)
    (first, second), _ = kinds.most_common(1)[0]
    yield Finding(
        id="attention-types",
        kind="qdq-structure",
        severity="note",
        layers=[layer for pair in pairs for layer in pair],
        title=f"QK in {first} and PV in {second} keep TensorRT from fusing {len(pairs)} attention(s)",
        evidence={"attentions": len(pairs), "qk": first, "pv": second},
        mend=Mend(text="Pin qk_matmul and pv_matmul alike where time matters more than what the pin gains."),
    )


def attention_pairs(planned: Planned) -> Iterator[tuple[str, str]]:
    """The QK product in front of each PV product, found through what lies between (scale, mask, softmax)."""
    model, roles = planned.model, planned.roles
    for layer in model.layers:
        if roles[layer.id].name != "pv_matmul":
            continue
        seen: set[str] = set()
        waiting = list(layer.inputs[:1])
        while waiting:
            source = model.producers.get(waiting.pop())
            if source is None or source.id in seen:
                continue
            seen.add(source.id)
            if roles[source.id].name == "qk_matmul":
                yield source.id, layer.id
                break
            if roles[source.id].name not in ("qkv_proj", "norm", "residual_add"):
                waiting.extend(source.reads)


def _skips(planned: Planned) -> Iterator[str]:
    """Residual Adds whose skip an engine keeps in float besides the quantized copy."""
    if planned.fused:
        return
    pinned = {layer for pin in planned.resolved.pins for layer in pin.layers}
    adds = list(residual_adds(planned.model, planned.resolved.formats, planned.resolver.floats.ids, pinned))
    if adds:
        yield (
            f"{len(adds)} residual Add(s) of quantized layers read their skip in float, first {adds[0]}: "
            "`placement: fused` in the plan quantizes it"
        )


def _more(layers: list[str]) -> str:
    return f" and {len(layers) - 1} more" if len(layers) > 1 else ""
