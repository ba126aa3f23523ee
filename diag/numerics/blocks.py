"""Formats with one scale for each block of neighbours: INT4, MXFP8 and NVFP4. Pure NumPy.

- INT4 (TensorRT: weights only): symmetric codes -8..7, a float scale for each block.
- MXFP8 (OCP MX 1.0): E4M3 elements, blocks of 32, an E8M0 scale: a power of two, `absmax / 448` rounded up,
  as cuDNN defines its block scale, so that nothing saturates.
- NVFP4: E2M1 elements, blocks of 16, an E4M3 scale for each block, and one float32 scale for the tensor,
  `absmax / (6 * 448)`, which brings the block scales into E4M3's range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diag.numerics.formats import FORMATS, Float, clamp_to, quantize, symmetric_scale

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3 = FORMATS["fp8"]
E2M1 = FORMATS["nvfp4"]

_TWO_SCALES = replace(E2M1, max=E2M1.max * E4M3.max)
_E8M0_EXPONENTS = (-127, 127)


@dataclass(frozen=True)
class Blocks:
    """Codes of a tensor's shape, and scales with one entry for each block along the axis."""

    codes: NDArray[np.generic]
    scales: NDArray[np.generic]
    """INT4: float32; MXFP8: E8M0; NVFP4: E4M3."""
    tensor_scale: float = 1.0
    """NVFP4's second scale, a multiple of all block scales."""


def split(values: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    """`values` with its axis cut into blocks: `(..., n, ...)` becomes `(..., n / size, size, ...)`."""
    shape = values.shape
    return values.reshape(*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])


def block_absmax(values: Float, axis: int, size: int) -> Float:
    """Largest magnitude of each block. The axis' length must be a multiple of `size`."""
    return np.asarray(np.abs(split(values, axis, size)).max(axis=axis + 1), np.float32)


def quantize_blocks(values: Float, scales: Float, fmt: str, axis: int) -> NDArray[np.generic]:
    """Codes of `values`, saturated; `scales` holds one float32 for each block along `axis`.

    A block whose scale is 0 (its values are below what NVFP4's block scale can say) becomes zeros.
    """
    blocks = split(values, axis, values.shape[axis] // scales.shape[axis])
    steps = np.expand_dims(np.where(scales == 0, np.float32(np.inf), scales), axis + 1)
    return quantize(blocks, steps, FORMATS[fmt]).reshape(values.shape)


def dequantize_blocks(codes: NDArray[np.generic], scales: Float, axis: int, size: int) -> Float:
    """Float32 values of codes; the last block may be shorter than `size` (ONNX allows it)."""
    if codes.shape[axis] == scales.shape[axis] * size:
        blocks = split(codes, axis, size).astype(np.float32) * np.expand_dims(scales, axis + 1)
        return np.asarray(blocks.reshape(codes.shape), np.float32)
    spread = np.repeat(scales, size, axis=axis)
    spread = spread[(slice(None),) * axis + (slice(codes.shape[axis]),)]
    return np.asarray(codes.astype(np.float32) * spread, np.float32)


def mxfp8_blocks(values: Float, axis: int) -> Blocks:
    """`values` in MXFP8 along `axis`, whose length must be a multiple of 32."""
    scales = e8m0_scale(block_absmax(values, axis, MXFP8_BLOCK))
    return Blocks(quantize_blocks(values, scales.astype(np.float32), "mxfp8", axis), scales)


def e8m0_scale(absmax: Float) -> NDArray[np.generic]:
    """The smallest power of two with `absmax / scale <= 448`, E8M0; 1 for a block of zeros."""
    mantissa, exponent = np.frexp(np.asarray(absmax, np.float64) / E4M3.max)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = np.where(absmax > 0, np.clip(exponent, *_E8M0_EXPONENTS), 0)
    return np.ldexp(1.0, exponent).astype(E8M0)


def nvfp4_blocks(values: Float, axis: int) -> Blocks:
    """`values` in NVFP4 along `axis`, whose length must be a multiple of 16."""
    absmax = block_absmax(values, axis, NVFP4_BLOCK)
    tensor_scale = nvfp4_tensor_scale(float(absmax.max(initial=0)))
    scales = nvfp4_block_scale(absmax, tensor_scale)
    steps = scales.astype(np.float32) * np.float32(tensor_scale)
    return Blocks(quantize_blocks(values, steps, "nvfp4", axis), scales, tensor_scale)


def nvfp4_tensor_scale(absmax: float) -> float:
    """`absmax / (6 * 448)`: the block with the largest value gets the largest E4M3 scale."""
    return float(symmetric_scale(np.array(absmax), _TWO_SCALES))


def nvfp4_block_scale(absmax: Float, tensor_scale: float) -> NDArray[np.generic]:
    """E4M3 scale of blocks, to nearest even, saturated at 448."""
    wanted = np.asarray(absmax, np.float32) / np.float32(E2M1.max) / np.float32(tensor_scale)
    return clamp_to(wanted, E4M3).astype(E4M3.dtype)
