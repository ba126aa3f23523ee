"""What ONNX's operator schemas say about element types: which inputs share the type that a format decides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import onnx
from onnx.defs import OpSchema

_FLOAT = "tensor(float)"
_NAMES = {"fp32": _FLOAT, "fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


@dataclass(frozen=True, slots=True)
class OpTypes:
    """Input and output positions whose type follows the layer's format; the last one repeats if variadic."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    variadic: bool

    def follows(self, index: int) -> bool:
        """Whether the input at `index` takes the layer's format."""
        if index < len(self.inputs):
            return self.inputs[index]
        return self.variadic and self.inputs[-1]


@lru_cache(maxsize=4096)
def op_types(op_type: str, domain: str, opset: int, fmt: str) -> OpTypes | None:
    """Type behaviour of an operator in a format; None when the operator cannot compute in it.

    Operators of other domains, and those with subgraphs, count as computing in FP32 only.
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
    outputs = tuple(o.type_str in follow for o in schema.outputs)
    if any(o.type_str in fixed for o in schema.outputs) or not any(outputs):
        return None
    variadic = bool(schema.inputs) and schema.inputs[-1].option == OpSchema.FormalParameterOption.Variadic
    return OpTypes(tuple(i.type_str in follow for i in schema.inputs), outputs, variadic)


def first_opset(op_type: str, fmt: str, opset: int) -> int | None:
    """Lowest opset at or above `opset` in which the operator computes in `fmt`; None when there is none."""
    newest = onnx.defs.onnx_opset_version()
    return next((v for v in range(opset, newest + 1) if op_types(op_type, "", v, fmt)), None)
