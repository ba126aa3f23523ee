"""One unit of execution in an engine, as every source of kernel lists describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

from diag.kernels.tactic import accumulator_of, math_type_of, multiplies

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float": "fp32", "fp32": "fp32", "float32": "fp32",
        "half": "fp16", "fp16": "fp16", "float16": "fp16",
        "bf16": "bf16", "bfloat16": "bf16", "bfloat": "bf16",
        "fp8": "fp8", "float8": "fp8", "e4m3": "fp8", "fp8e4m3": "fp8",
        "fp4": "fp4", "e2m1": "fp4", "float4": "fp4", "fp4e2m1": "fp4",
        "int8": "int8", "uint8": "uint8", "int4": "int4",
        "int32": "int32", "int64": "int64", "bool": "bool", "e8m0": "e8m0",
    }
)  # fmt: skip
"""TensorRT's words for element types, in lower case, and ours."""

WIDTH_BITS: Mapping[str, int] = MappingProxyType(
    {"int4": 4, "fp4": 4, "int8": 8, "fp8": 8, "fp16": 16, "bf16": 16, "fp32": 32}
)
"""Types that carry a layer's values, and their width."""

_WORD = re.compile(r"[a-z0-9]+")


def dtype_of(text: str) -> str:
    """Our name of an element type in TensorRT's words ('Half', 'Row major linear FP16 format'), or ''."""
    words = _WORD.findall(text.lower().removeprefix("datatype."))
    return next((DTYPES[word] for word in words if word in DTYPES), "")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A kernel's input or output. A dimension is -1 when it is only known at run time."""

    name: str
    dims: tuple[int, ...]
    dtype: str
    format: str = ""
    constant: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether at least two of its dimensions are more than one: an operand, and no bias or scale."""
        return sum(size != 1 for size in self.dims) >= 2

    @property
    def is_scalar(self) -> bool:
        """Whether it holds one element: the alpha and beta of a GEMM, a scale."""
        return prod(self.dims) == 1


@dataclass(frozen=True)
class Kernel:
    """One unit of execution, with the ONNX nodes that were fused into it.

    `inputs` are followed by the constants, where a source lists them apart. `nodes` is generous: TensorRT
    also names nodes whose quantizer or layout change alone went into the kernel (see `diag.kernels.nodes`).
    """

    name: str
    layer_type: str
    nodes: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    tactic: str = ""
    stream: int = 0
    time_ms: float | None = None

    @cached_property
    def accumulator(self) -> str:
        """Type in which a GEMM or convolution adds up: fp16, fp32, int32, or '' when the tactic is silent."""
        return accumulator_of(self.tactic)

    @cached_property
    def math_type(self) -> str:
        """Type in which it multiplies (`tf32` is told from fp32 here); '' when the tactic does not tell."""
        return math_type_of(self.tactic)

    @cached_property
    def multiplies(self) -> bool:
        """Whether it runs a GEMM, a convolution or fused attention."""
        return multiplies(self.layer_type, self.name, self.tactic)

    @property
    def is_reformat(self) -> bool:
        """Whether it only changes layout or type, and none of the model's arithmetic."""
        return self.layer_type.lower() in ("reformat", "reformatting") or (
            not self.multiplies and _only_moves(self.name)
        )

    @property
    def dtypes(self) -> frozenset[str]:
        """Types of all tensors that carry values, scalars left out."""
        tensors = (t for t in (*self.inputs, *self.outputs) if not t.is_scalar)
        return frozenset(t.dtype for t in tensors if t.dtype in WIDTH_BITS)


# Generated kernels are named by their steps, three or four letters each; `Etc` stands for steps left out.
_MOVES = re.compile(r"^__myl_(?:Cast?|Move|Tran?|Resh?|Repl?|Conc?|Slic?)+_myl\d+_\d+$")


def _only_moves(name: str) -> bool:
    return _MOVES.match(name) is not None
