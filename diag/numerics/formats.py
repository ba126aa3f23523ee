"""Number formats: limits, rounding, and symmetric integer quantization. Pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """A number format. Limits are in the format's own values (integers: in steps of the scale)."""

    name: str
    dtype: np.dtype[np.generic]
    max: float
    """Largest finite value."""
    unit_roundoff: float
    """Half the spacing of the numbers just above 1; 0 for integers."""
    quantized: bool = False
    """Whether values are stored as codes times a scale."""


def _float(name: str, dtype: Any, quantized: bool = False) -> Format:
    info = ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
    return Format(name, np.dtype(dtype), float(info.max), float(info.eps) / 2, quantized)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _float("fp32", np.float32),
        _float("fp16", np.float16),
        _float("bf16", ml_dtypes.bfloat16),
        _float("fp8", ml_dtypes.float8_e4m3fn, quantized=True),
        Format("int8", np.dtype(np.int8), 127.0, 0.0, quantized=True),
        Format("int4", np.dtype(ml_dtypes.int4), 7.0, 0.0, quantized=True),
        Format("tf32", np.dtype(np.float32), float(np.finfo(np.float32).max), 2.0**-11),
        _float("mxfp8", ml_dtypes.float8_e4m3fn, quantized=True),
        _float("nvfp4", ml_dtypes.float4_e2m1fn, quantized=True),
    )
}
"""Formats a plan may name. Limits: IEEE 754 (fp16), bfloat16, OCP OFP8 (E4M3), OCP MX (E2M1).

The last two share a scale in blocks and are named by their elements' limits: `diag.numerics.blocks`.
"""

BLOCK_FORMATS = frozenset({"int4", "mxfp8", "nvfp4"})
"""Formats with a scale for each block of weights: for MatMul and Gemm with constant weights, since TensorRT
cuts blocks along the last two dimensions only."""


def round_to(values: Float, fmt: Format) -> Float:
    """Round float32 values to a float format, ties to even; overflow becomes infinity where there is one.

    Any shape. E4M3 has no infinity: values that round past 448 become NaN (OCP OFP8, non-saturating mode).
    """
    if fmt.name == "tf32":
        return round_tf32(values)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(fmt.dtype).astype(np.float32)


def round_tf32(values: Float) -> Float:
    """Values with 10 bits of mantissa, to nearest, ties away from zero; NaN and infinity stay. Any shape.

    Kept in float32. Ties as in NVIDIA's `cvt.rna.tf32.f32`, the only conversion to nearest that PTX has.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values).astype(np.float32).reshape(np.shape(values))


def clamp_to(values: Float, fmt: Format) -> Float:
    """Values limited to the format's finite range; NaN stays."""
    return np.clip(values, -fmt.max, fmt.max)


def symmetric_scale(absmax: NDArray[np.floating], fmt: Format) -> Float:
    """Scale of one quantization step, `absmax / max code`, float32; at least the smallest normal float32.

    A tensor or channel that is zero everywhere (or NaN) gets scale 1 / max code: any scale represents it, and
    TensorRT refuses a zero scale. Infinity counts as the largest float32, so that the scale is finite.
    """
    absmax = np.minimum(np.asarray(absmax, np.float64), np.finfo(np.float32).max)
    scale = np.where(absmax > 0, absmax, 1.0) / fmt.max
    return np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float32)


def quantize(values: Float, scale: Float, fmt: Format, axis: int | None = None) -> NDArray[np.generic]:
    """Codes `round(values / scale)`, ties to even, saturated (int8: -128..127), as ONNX defines it.

    `scale` is a scalar, or one value for each index of `axis`. Infinity saturates; NaN stays NaN in FP8 and
    becomes 0 in an integer format, which has no code for it.
    """
    with np.errstate(over="ignore"):  # a quotient beyond float32 saturates like any other
        scaled = values / _along(scale, values.ndim, axis)
    if fmt.unit_roundoff:
        return clamp_to(scaled, fmt).astype(fmt.dtype)
    codes = np.clip(np.rint(scaled), -fmt.max - 1, fmt.max)
    return np.where(np.isnan(codes), np.float32(0), codes).astype(fmt.dtype)


def dequantize(codes: NDArray[np.generic], scale: Float, axis: int | None = None) -> Float:
    """Float32 values of codes; `scale` as in `quantize`."""
    result: Float = codes.astype(np.float32) * _along(scale, codes.ndim, axis)
    return result


def _along(scale: Float, rank: int, axis: int | None) -> Float:
    scale = np.asarray(scale, np.float32)
    if axis is None or scale.ndim == 0:
        return scale
    shape = [1] * rank
    shape[axis] = -1
    return scale.reshape(shape)
