"""What ONNX's operator schemas say about element types: which inputs share the type that a format decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import onnx
from onnx.defs import OpSchema

from diag.model.load import OPSETS

_FLOAT = "tensor(float)"
_NAMES = {"fp32": _FLOAT, "fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


@dataclass(frozen=True, slots=True)
class OpTypes:
    """Input and output positions whose type follows the layer's format; a variadic last one repeats."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    variadic_input: bool
    variadic_output: bool

    def reads(self, index: int) -> bool:
        """Whether the input at `index` takes the layer's format."""
        return _at(self.inputs, index, self.variadic_input)

    def writes(self, index: int) -> bool:
        """Whether the output at `index` has the layer's format."""
        return _at(self.outputs, index, self.variadic_output)


def _at(follows: tuple[bool, ...], index: int, variadic: bool) -> bool:
    if index < len(follows):
        return follows[index]
    return variadic and follows[-1]


@lru_cache(maxsize=4096)
def op_types(op_type: str, domain: str, opset: int, fmt: str) -> OpTypes | None:
    """Type behaviour of an operator in a format; None when the operator cannot compute in it.

    Operators of other domains, and those with subgraphs, count as computing in FP32 only. An output whose
    type no input shares (a norm's mean, random numbers) is typed by an attribute and stays as it is; but a
    Cast's follows, because the rewrite changes what it casts to.
    """
    try:
        schema = onnx.defs.get_schema(op_type, max_inclusive_version=opset, domain=domain)
    except onnx.defs.SchemaError:
        return None
    if any(a.type == OpSchema.AttrType.GRAPH for a in schema.attributes.values()):
        return None
    wanted = _NAMES[fmt]
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    follow = {name for name, types in allowed.items() if _FLOAT in types and wanted in types}
    fixed = {name for name, types in allowed.items() if _FLOAT in types and wanted not in types}
    shared = {i.type_str for i in schema.inputs}
    if op_type == "Cast":
        shared.update(o.type_str for o in schema.outputs)
    outputs = tuple(o.type_str in follow & shared for o in schema.outputs)
    if any(o.type_str in fixed & shared for o in schema.outputs) or not any(outputs):
        return None
    inputs = tuple(i.type_str in follow for i in schema.inputs)
    return OpTypes(inputs, outputs, _is_variadic(schema.inputs), _is_variadic(schema.outputs))


def _is_variadic(parameters: Sequence[OpSchema.FormalParameter]) -> bool:
    return bool(parameters) and parameters[-1].option == OpSchema.FormalParameterOption.Variadic


def first_opset(op_type: str, fmt: str, opset: int) -> int | None:
    """Lowest opset at or above `opset` in which the operator computes in `fmt`; None when there is none.

    The newest looked at is the newest that can be loaded: engines know no later one.
    """
    return next((v for v in range(opset, OPSETS.stop) if op_types(op_type, "", v, fmt)), None)
