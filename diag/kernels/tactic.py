"""What a tactic's name tells: does it multiply, in which type, and in which type it adds up.

Names follow a few families, read from engines of TensorRT 8.6 to 10.6:
`sm90_xmma_gemm_f16f16_f16f32_f32_tn_...` is <A><C>_<multiply><accumulate>_<scale>, and
`ampere_h16816gemm_...` / `cutlass_80_tensorop_s16816gemm_...` start with h (FP16), s (FP32) or i (INT32).
TensorRT-RTX chooses tactics at run time and writes a stub.
"""

from __future__ import annotations

import re

_TYPE = r"(?:tf32|bf16|f16|f32|i8|u8|i4|e4m3|e5m2|e2m1|b1)"
_XMMA = re.compile(rf"_{_TYPE}{_TYPE}_({_TYPE})(f16|f32|bf16|i32)_(?:bf16|f16|f32|i32|i8)(?:_|$)")
_TENSOR_CORE = re.compile(
    r"(?:^|_)([his])(?:16816|1688|884|16832|16864|8816|64x\d+x\d+)(?:tf32)?(?:gemm|fprop|cudnn)"
)
_PLAIN = re.compile(r"(?:^|_)(?:([hs])gemm|(i)8gemm|([hsi])cudnn)(?:_|$)")

_XMMA_MATH = {
    "tf32": "tf32", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "i8": "int8", "u8": "int8", "i4": "int4",
    "e4m3": "fp8", "e5m2": "fp8", "e2m1": "fp4",
}  # fmt: skip
_XMMA_ACCUMULATOR = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "i32": "int32"}

_MULTIPLYING_TYPE = re.compile(r"gemm|conv(?!ert)|matrix_?multiply|_?mha|attention|cublas")
# Generated kernels are named by their steps; a step ends where the next capital letter begins.
_MULTIPLYING_NAME = re.compile(
    r"gemm|_mha|fmha|^__myl_(?:[A-Z][a-z]+)*?(?:Fc|Conv|Deco|Gemm|Bmm|MatMul)(?![a-z])"
)
_MULTIPLYING_TACTIC = re.compile(r"gemm|_mha|fmha|fprop|dgrad|conv(?!ert)|cudnn|CASK")


def accumulator_of(tactic: str) -> str:
    """Type in which the kernel adds up products; '' when the name does not tell."""
    return _types_of(tactic)[1]


def math_type_of(tactic: str) -> str:
    """Type in which the kernel multiplies; '' when the name does not tell."""
    return _types_of(tactic)[0]


def _types_of(tactic: str) -> tuple[str, str]:
    if match := _XMMA.search(tactic):
        return _XMMA_MATH.get(match[1], ""), _XMMA_ACCUMULATOR[match[2]]
    if match := _TENSOR_CORE.search(tactic):
        wide = "tf32" if "tf32" in tactic else "bf16" if "bf16" in tactic else "fp16"
        return {"h": ("fp16", "fp16"), "i": ("int8", "int32"), "s": (wide, "fp32")}[match[1]]
    if match := _PLAIN.search(tactic):
        letter = match[1] or match[2] or match[3]
        return {"h": ("fp16", "fp16"), "i": ("int8", "int32"), "s": ("fp32", "fp32")}[letter]
    return "", ""


def multiplies(layer_type: str, name: str, tactic: str) -> bool:
    """Whether a kernel runs a GEMM, a convolution or fused attention, and not only what stands around one."""
    kind = layer_type.lower()
    if _MULTIPLYING_TYPE.search(kind):
        return True
    if kind in ("reformat", "shape_call", "shapehosttodevice", "constant", "shuffle"):
        return False
    return bool(_MULTIPLYING_NAME.search(name) or _MULTIPLYING_TACTIC.search(tactic))
