"""Evaluates typed graphs node by node: ONNX's reference evaluator in FP32, then a rounding by ml_dtypes.

Nothing here uses the product's emulator or its number formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.typed.apply import TypedModel, apply_formats

FLOAT, HALF, BFLOAT, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.BOOL,
)

NARROW: Mapping[int, Any] = {HALF: np.float16, BFLOAT: ml_dtypes.bfloat16}

Array = NDArray[Any]
Values = Mapping[str, Array]


def node(op: str, inputs: str, outputs: str, name: str, **attributes: Any) -> NodeProto:
    """A node whose tensor names are given as words; `-` stands for an absent input."""
    names = ["" if word == "-" else word for word in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=name, **attributes)


def graph(
    nodes: list[NodeProto],
    inputs: Mapping[str, tuple[int, list[int | str]]],
    outputs: str = "y",
    constants: Mapping[str, Array] | None = None,
    opset: int = 17,
) -> Model:
    """A small model with FP32 outputs."""
    made = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in (constants or {}).items()],
    )
    return from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def typed_model(
    model: Model, formats: Mapping[str, str], scales: Mapping[str, float] | None = None, **options: Any
) -> TypedModel:
    """Formats by layer id; layers left out stay FP32. `scales` are those of INT8, by tensor."""
    every = {layer.id: "fp32" for layer in model.layers} | dict(formats)
    return apply_formats(model, every, scales={"int8": scales or {}}, **options)


def as_model(typed: TypedModel) -> Model:
    return typed.model


def all_values(proto: ModelProto, weights: Values, feeds: Values) -> dict[str, Array]:
    """Every tensor that a node of the graph makes, in a type that NumPy knows, and the inputs."""
    probe = ModelProto()
    probe.CopyFrom(proto)
    del probe.graph.output[:]
    narrow = [n for n in proto.graph.node if n.op_type == "Cast" and n.attribute[0].i in NARROW]
    names = dict.fromkeys(name for n in proto.graph.node if n not in narrow for name in n.output if name)
    probe.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return {**feeds, **Session(probe, weights).run(feeds)}


def constants_of(model: Model | TypedModel) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for tensor in model.proto.graph.initializer:
        beside = model.weights.get(tensor.name)
        found[tensor.name] = numpy_helper.to_array(tensor) if beside is None else np.asarray(beside)
    return found


def elem_types(proto: ModelProto) -> dict[str, int]:
    graph_ = onnx.shape_inference.infer_shapes(proto).graph
    return {v.name: v.type.tensor_type.elem_type for v in (*graph_.input, *graph_.value_info, *graph_.output)}


def rounded(values: Array, elem_type: int) -> Array:
    """FP32 values rounded to FP16 or BF16 and back; other types as they are."""
    if elem_type not in NARROW or values.dtype != np.float32:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NARROW[elem_type]).astype(np.float32)


def wide(values: Array) -> Array:
    narrow = values.dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    return values.astype(np.float32) if narrow else values


def quantize_int8(values: Array, scale: Array) -> Array:
    """ONNX's QuantizeLinear, zero point 0: round half to even, saturate."""
    with np.errstate(invalid="ignore"):
        return np.clip(np.rint(values / wide(np.asarray(scale))), -128, 127).astype(np.int8)


def evaluate(n: NodeProto, proto: ModelProto, values: Values, types: Mapping[str, int]) -> list[Array]:
    """Outputs of one node of a typed graph, given its inputs as FP32 values."""
    inputs = {name: wide(values[name]) for name in n.input if name}
    if n.op_type == "QuantizeLinear":
        return [quantize_int8(inputs[n.input[0]], inputs[n.input[1]])]
    if n.op_type == "DequantizeLinear":
        codes, scale = inputs[n.input[0]].astype(np.float32), inputs[n.input[1]]
        if scale.ndim:
            axis = helper.get_attribute_value(n.attribute[0])
            scale = scale.reshape([-1 if i == axis else 1 for i in range(codes.ndim)])
        return [rounded(codes * scale, types[n.output[0]])]
    if n.op_type == "Cast":
        target = helper.get_attribute_value(n.attribute[0])
        source = inputs[n.input[0]]
        dtype = np.float32 if target in NARROW else helper.tensor_dtype_to_np_dtype(target)
        return [rounded(source.astype(dtype), target)]
    if n.op_type == "BatchNormalization":  # the reference evaluator's old versions train
        x, gain, bias, mean, variance = (inputs[name] for name in n.input)
        along = (-1, *[1] * (x.ndim - 2))
        unit = (x - mean.reshape(along)) / np.sqrt(variance.reshape(along) + np.float32(1e-5))
        return [rounded(unit * gain.reshape(along) + bias.reshape(along), types[n.output[0]])]
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for name, v in inputs.items()
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in n.output]
    single = helper.make_model(
        helper.make_graph([n], "one", typed, made), opset_imports=proto.opset_import, ir_version=9
    )
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(single).run(None, inputs)
    return [
        rounded(np.asarray(value), types.get(name, 0)) for name, value in zip(n.output, results, strict=True)
    ]


def steps_apart(a: Array, b: Array, elem_type: int) -> int:
    """Largest distance in representable numbers of a 16-bit format; NaN equals NaN."""
    dtype = NARROW[elem_type]
    both_nan = np.isnan(a) & np.isnan(b)
    assert np.array_equal(np.isnan(a), np.isnan(b))
    keys = []
    for values in (a, b):
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = np.ascontiguousarray(values.astype(dtype))
        assert np.array_equal(narrow.astype(np.float32), values, equal_nan=True)  # is in the format at all
        bits = narrow.view(np.int16).astype(np.int64)
        keys.append(np.where(bits < 0, -(bits & 0x7FFF), bits))
    distance = np.where(both_nan, 0, np.abs(keys[0] - keys[1]))
    return int(distance.max(initial=0))
