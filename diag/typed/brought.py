"""The quantizers that a model brings: QuantizeLinear and DequantizeLinear as facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from diag.model.graph import Layer, Model
from diag.typed.operands import REARRANGES

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

INTEGER_OPS = frozenset(
    {
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
        "DynamicQuantizeLinear",
        "QGemm",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
    }
)
"""Operators that compute on codes: ONNX Runtime's other way to quantize, which TensorRT does not read."""

_FORMATS = {
    "INT8": "int8",
    "UINT8": "int8",
    "FLOAT8E4M3FN": "fp8",
    "INT4": "int4",
}
_DEFAULT_AXIS = 1

Kind = Literal["activation", "weight", "stored"]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """One DequantizeLinear, with the QuantizeLinear before it where there is one."""

    layer: str
    """Id of the DequantizeLinear."""
    quantize: str | None
    """Id of the QuantizeLinear; None for stored codes."""
    kind: Kind
    """`weight`: a float constant is quantized; `stored`: the model holds codes."""
    source: str
    """The tensor that is quantized, or the codes."""
    output: str
    """The dequantized tensor."""
    code_type: int
    """ONNX element type of the codes."""
    scale: NDArray[np.float32] | None
    """None when it is computed."""
    zero_point: NDArray[np.float32] | None
    """None when it is computed; 0 where it is absent."""
    axis: int
    """Axis of a scale for each channel or block, as given; it may be negative."""
    block_size: int
    """Elements along `axis` that share a scale; 0 without blocks."""

    @property
    def per_tensor(self) -> bool:
        return self.scale is not None and self.scale.size == 1 and not self.block_size

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is 0 in every channel."""
        return self.zero_point is not None and not self.zero_point.any()

    @property
    def format(self) -> str | None:
        """The plan's format of such codes; None when no plan has one (INT32 of a bias among them)."""
        return _FORMATS.get(self.code_name)

    @property
    def rectifies(self) -> bool:
        """Whether zero is the smallest code of an activation: negative values become 0, as by a Relu."""
        lowest = {"UINT8": 0.0, "INT8": -128.0}.get(self.code_name)
        zero = self.zero_point
        return (
            self.kind == "activation"
            and zero is not None
            and lowest is not None
            and bool((zero == lowest).all())
        )

    @property
    def code_name(self) -> str:
        """The codes' type by ONNX's name, `UINT8` for example."""
        return str(TensorProto.DataType.Name(self.code_type))


def find_quantizers(model: Model) -> tuple[Quantizer, ...]:
    """Every DequantizeLinear of the main graph, in graph order."""
    return tuple(_found(model))


def quantizer_of(model: Model, by_output: Mapping[str, Quantizer], name: str) -> Quantizer | None:
    """The quantizer that a tensor comes from, seen through what only rearranges values."""
    while name not in by_output:
        producer = model.producers.get(name)
        if producer is None or producer.op_type not in REARRANGES:
            return None
        name = producer.inputs[0]
    return by_output[name]


def same_steps(first: Quantizer, second: Quantizer) -> bool:
    """Whether what comes out of the first is left as it is by the second."""
    if first.code_type != second.code_type or first.scale is None or second.scale is None:
        return False
    if first.zero_point is None or second.zero_point is None:
        return False
    return np.array_equal(first.scale, second.scale) and np.array_equal(first.zero_point, second.zero_point)


def _found(model: Model) -> Iterator[Quantizer]:
    for layer in model.layers:
        if layer.op_type != DEQUANTIZE:
            continue
        before = model.producers.get(layer.inputs[0])
        quantize = before if before is not None and before.op_type == QUANTIZE else None
        holder = quantize or layer
        source = holder.inputs[0]
        if quantize is None:
            kind: Kind = "stored"
        else:
            kind = "activation" if source in model.value_dependent else "weight"
        size = layer.attributes.get("block_size", 0)
        axis = layer.attributes.get("axis", _DEFAULT_AXIS)
        yield Quantizer(
            layer=layer.id,
            quantize=quantize.id if quantize else None,
            kind=kind,
            source=source,
            output=layer.outputs[0],
            code_type=_code_type(model, layer, quantize),
            scale=_floats(model, layer.inputs[1]),
            zero_point=_zero_point(model, layer),
            axis=axis if isinstance(axis, int) else _DEFAULT_AXIS,
            block_size=size if isinstance(size, int) else 0,
        )


def _code_type(model: Model, layer: Layer, quantize: Layer | None) -> int:
    """From the zero point, the stored codes or what the QuantizeLinear says; ONNX's default is UINT8."""
    for holder in (layer, quantize):
        name = holder.inputs[2] if holder is not None and len(holder.inputs) > 2 else ""
        value = model.constant(name) if name else None
        if value is not None:
            return int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
    if quantize is None:
        value = model.constant(layer.inputs[0])
        if value is None:  # made by an operator of TensorRT's own, MXFP8's or NVFP4's
            return _declared_type(model, layer.inputs[0])
        return int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
    told = quantize.attributes.get("output_dtype", 0)
    return told if isinstance(told, int) and told else int(TensorProto.UINT8)


def _declared_type(model: Model, name: str) -> int:
    """Element type that the graph declares for a tensor, 0 when it declares none."""
    declared = (v.type.tensor_type.elem_type for v in model.proto.graph.value_info if v.name == name)
    return next(declared, 0)


def _floats(model: Model, name: str) -> NDArray[np.float32] | None:
    value = model.constant(name)
    return None if value is None else value.astype(np.float32)


def _zero_point(model: Model, layer: Layer) -> NDArray[np.float32] | None:
    name = layer.inputs[2] if len(layer.inputs) > 2 else ""
    return _floats(model, name) if name else np.zeros((), np.float32)


def dequantized(codes: NDArray[np.generic], quantizer: Quantizer) -> NDArray[np.float32]:
    """Float32 values of stored codes, as ONNX defines DequantizeLinear: per tensor, channel or block."""
    assert quantizer.scale is not None and quantizer.zero_point is not None
    scale = _along(quantizer.scale, codes.shape, quantizer)
    zero_point = _along(quantizer.zero_point, codes.shape, quantizer)
    wide = codes.astype(ml_dtypes.bfloat16) if codes.dtype == np.dtype(ml_dtypes.int4) else codes
    values: NDArray[np.float32] = (wide.astype(np.float32) - zero_point) * scale
    return values


def _along(values: NDArray[np.float32], shape: tuple[int, ...], quantizer: Quantizer) -> NDArray[np.float32]:
    if values.size == 1:
        return values.reshape(())
    if quantizer.block_size:
        wide = np.repeat(values, quantizer.block_size, axis=quantizer.axis)
        return wide[tuple(slice(size) for size in shape)]
    along = [1] * len(shape)
    along[quantizer.axis] = -1
    return values.reshape(along)
