"""Rules on single quantizers: what TensorRT refuses or cannot use, by type, zero point, scale and axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diag.lint.hazard import QDQ, Hazard, hazards
from diag.model.graph import LINEAR_OPS, Layer, Model, TensorInfo
from diag.typed.brought import Quantizer
from diag.typed.operands import weight_axis

_TINY = np.finfo(np.float32).tiny
_CODES = frozenset({"INT8", "UINT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1"})
"""Types of codes that TensorRT reads; UINT8 with zero point 0 only."""

_FIX = "Quantize again, symmetrically and to INT8 (zero point 0)."


def check_quantizers(
    model: Model, quantizers: Sequence[Quantizer], types: Mapping[str, TensorInfo]
) -> Iterator[Hazard]:
    """Hazards of each quantizer by itself."""
    yield from _types(quantizers)
    yield from _zero_points(quantizers)
    yield from _scales(quantizers)
    yield from _lengths(quantizers, types)
    yield from _axes(model, quantizers)


def _types(quantizers: Sequence[Quantizer]) -> Iterator[Hazard]:
    bias = [q.layer for q in quantizers if q.kind == "stored" and q.code_name == "INT32"]
    yield from hazards(
        ("bias-codes", QDQ, "error"),
        bias,
        f"{len(bias)} biases are stored as INT32 codes, which TensorRT does not read, first {_first(bias)}",
        "Leave biases in float (ONNX Runtime: extra_options={'QuantizeBias': False}); inspect --out does it.",
    )
    unsigned = [q for q in quantizers if q.code_name == "UINT8" and q.symmetric]
    yield from hazards(
        ("uint8", QDQ, "warning"),
        [q.layer for q in unsigned],
        f"{len(unsigned)} quantizers use UINT8: TensorRT's INT8 kernels are signed, {_named(unsigned)}",
        _FIX,
    )
    known = {*_CODES, "INT32" if bias else ""}
    other = [q for q in quantizers if q.code_name not in known]
    yield from hazards(
        ("code-type", QDQ, "error"),
        [q.layer for q in other],
        f"{len(other)} quantizers use {', '.join(sorted({q.code_name for q in other}))}, which TensorRT does "
        f"not read, {_named(other)}",
        _FIX,
    )


def _zero_points(quantizers: Sequence[Quantizer]) -> Iterator[Hazard]:
    shifted = [q for q in quantizers if q.zero_point is not None and q.zero_point.any()]
    first = (
        float(shifted[0].zero_point.reshape(-1)[0]) if shifted and shifted[0].zero_point is not None else 0
    )
    yield from hazards(
        ("zero-point", QDQ, "error"),
        [q.layer for q in shifted],
        f"{len(shifted)} quantizers have a zero point that is not 0, which TensorRT refuses, "
        f"{_named(shifted)} ({first:g})",
        f"{_FIX} inspect --out makes a symmetric plan and table of this model.",
        zero_point=first,
    )


def _scales(quantizers: Sequence[Quantizer]) -> Iterator[Hazard]:
    given = [(q, q.scale) for q in quantizers if q.scale is not None]
    rules: tuple[tuple[str, str, Callable[[NDArray[np.float32]], NDArray[np.bool_]]], ...] = (
        ("scale-not-positive", "zero or negative", lambda s: s <= 0),
        ("scale-denormal", "denormal, and may count as zero", lambda s: (s > 0) & (s < _TINY)),
        ("scale-not-finite", "NaN or infinite", lambda s: ~np.isfinite(s)),
    )
    for name, said, is_bad in rules:
        bad = [(q, np.flatnonzero(is_bad(scale))) for q, scale in given]
        bad = [(q, places) for q, places in bad if places.size]
        where = f", channel {bad[0][1][0]}" if bad and not bad[0][0].per_tensor else ""
        yield from hazards(
            (name, QDQ, "error"),
            [q.layer for q, _ in bad],
            f"{len(bad)} quantizers have a scale that is {said}, {_named([q for q, _ in bad])}{where}",
            "A channel or tensor of zeros needs some positive scale; calibrate or quantize again.",
            scales=float(sum(places.size for _, places in bad)),
        )


def _lengths(quantizers: Sequence[Quantizer], types: Mapping[str, TensorInfo]) -> Iterator[Hazard]:
    wrong = [q for q in quantizers if _has_other_length(q, types.get(q.source))]
    yield from hazards(
        ("scale-length", QDQ, "error"),
        [q.layer for q in wrong],
        f"{len(wrong)} quantizers have another number of scales than channels, {_named(wrong)}",
        "The model is broken; quantize again.",
    )


def _has_other_length(quantizer: Quantizer, source: TensorInfo | None) -> bool:
    scale, shape = quantizer.scale, source.shape if source else None
    if scale is None or scale.ndim != 1 or scale.size == 1 or shape is None or quantizer.block_size:
        return False
    if not -len(shape) <= quantizer.axis < len(shape):
        return True
    size = shape[quantizer.axis]
    return isinstance(size, int) and size != scale.size


def _axes(model: Model, quantizers: Sequence[Quantizer]) -> Iterator[Hazard]:
    activations = [
        q for q in quantizers if q.kind == "activation" and not q.per_tensor and q.scale is not None
    ]
    yield from hazards(
        ("activation-by-channel", QDQ, "error"),
        [q.layer for q in activations],
        f"{len(activations)} activations are quantized by channel; INT8 kernels take one scale for a tensor, "
        f"{_named(activations)}",
        "Quantize activations per tensor.",
    )
    wrong = list(_reduced_axes(model, {q.output: q for q in quantizers}))
    named = f"first {wrong[0][0].id}, axis {wrong[0][1]} where {wrong[0][2]} is the output's" if wrong else ""
    yield from hazards(
        ("weight-axis", QDQ, "error"),
        [layer.id for layer, _, _ in wrong],
        f"{len(wrong)} weights have scales along an axis that is summed over, so no INT8 kernel uses them, "
        f"{named}",
        "Quantize along the output channels: Conv axis 0, ConvTranspose axis 1, MatMul and Gemm the columns.",
    )


def _reduced_axes(model: Model, by_output: Mapping[str, Quantizer]) -> Iterator[tuple[Layer, int, int]]:
    """Linear layers whose weight has a scale for each index of another axis than the output's."""
    for layer in model.layers:
        if layer.op_type not in LINEAR_OPS:
            continue
        for index, name in enumerate(layer.inputs[:2]):
            quantizer = by_output.get(name)
            if quantizer is None or quantizer.kind == "activation" or quantizer.block_size:
                continue
            scale, weight = quantizer.scale, _weight(model, quantizer)
            if scale is None or scale.size == 1 or weight is None:
                continue
            right, axis = weight_axis(layer, index, weight.ndim), quantizer.axis % weight.ndim
            if axis != right:
                yield layer, axis, right


def _weight(model: Model, quantizer: Quantizer) -> NDArray[np.generic] | None:
    return model.constant(quantizer.source)


def _first(names: Sequence[str]) -> str:
    return names[0] if names else ""


def _named(quantizers: Sequence[Quantizer]) -> str:
    return f"first {quantizers[0].layer}" if quantizers else ""
