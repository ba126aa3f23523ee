"""Applies plans to small graphs, and looks at the result with ONNX and NumPy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from diag.calibration.minmax import measure_ranges
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.plan.resolve import resolve
from diag.plan.schema import Plan
from diag.progress import Silent
from diag.roles import find_roles, norm_parts
from diag.typed.apply import TypedModel, apply_formats, operands_of

FLOAT, HALF, BFLOAT, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.BOOL,
)

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Rewritten:
    """A model, what a plan made of it, and the formats that were asked for."""

    model: Model
    typed: TypedModel
    formats: Mapping[str, str]

    @cached_property
    def node(self) -> dict[str, NodeProto]:
        return {node.name: node for node in self.typed.proto.graph.node}

    @cached_property
    def producer(self) -> dict[str, NodeProto]:
        return {name: node for node in self.typed.proto.graph.node for name in node.output}

    @cached_property
    def constants(self) -> dict[str, NDArray[Any]]:
        found = {}
        for tensor in self.typed.proto.graph.initializer:
            beside = self.typed.weights.get(tensor.name)
            found[tensor.name] = numpy_helper.to_array(tensor) if beside is None else beside
        return found

    @cached_property
    def elem_types(self) -> dict[str, int]:
        """Element types as ONNX infers them for the rewritten model."""
        graph = onnx.shape_inference.infer_shapes(whole(self.typed)).graph
        found = {
            v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)
        }
        return found | {t.name: t.data_type for t in graph.initializer}


def rewrite(model: Model, plan: Plan, feeds: Feeds | None = None) -> Rewritten:
    """Resolve the plan with the model's own roles, calibrate on `feeds`, apply."""
    types = shapes.infer(model)
    roles = find_roles(model)
    names = {layer: role.name for layer, role in roles.items()}
    blocks = {layer: role.block for layer, role in roles.items()}
    formats = resolve(plan, model, names, blocks, norm_parts(model), types).formats
    return apply_as(model, formats, feeds, base=plan.base, out_of_range=plan.constants.out_of_range)


def apply_as(
    model: Model, formats: Mapping[str, str], feeds: Feeds | None = None, **options: Any
) -> Rewritten:
    """Apply formats by layer id; layers left out stay FP32. Scales are absmax / largest code on `feeds`."""
    formats = {layer.id: "fp32" for layer in model.layers} | dict(formats)
    operands = operands_of(model, formats, shapes.infer(model))
    needed = list(dict.fromkeys(o.tensor for o in operands if o.weight is None))
    scales: dict[str, dict[str, float]] = {}
    if needed:
        assert feeds is not None
        ranges = measure_ranges(model, needed, [feeds], Silent())
        scales = {
            fmt: {name: max(r.absmax, 1e-30) / largest for name, r in ranges.items()}
            for fmt, largest in (("int8", 127), ("fp8", 448))
        }
    return Rewritten(model, apply_formats(model, formats, scales=scales, **options), formats)


def whole(typed: TypedModel) -> ModelProto:
    """The rewritten model with every weight inside, as a file would hold it."""
    proto = ModelProto()
    proto.CopyFrom(typed.proto)
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            array = np.asarray(typed.weights[tensor.name])
            raw = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            raw.raw_data = np.ascontiguousarray(array).tobytes()
            tensor.CopyFrom(raw)
    return proto


def node(op: str, inputs: str, outputs: str, name: str, **attributes: Any) -> NodeProto:
    """A node whose tensor names are given as words; `-` stands for an absent input."""
    names = ["" if word == "-" else word for word in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=name, **attributes)


def graph(
    nodes: list[NodeProto],
    inputs: Mapping[str, tuple[int, list[int | str]]],
    outputs: Mapping[str, int] | None = None,
    constants: Mapping[str, NDArray[Any]] | None = None,
    opset: int = 17,
    domains: tuple[str, ...] = (),
) -> Model:
    """A small model; outputs are FP32 unless their types are given."""
    proto = helper.make_model(
        helper.make_graph(
            nodes,
            "small",
            [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()],
            [helper.make_tensor_value_info(n, t, None) for n, t in (outputs or {"y": FLOAT}).items()],
            [numpy_helper.from_array(np.asarray(v), name) for name, v in (constants or {}).items()],
        ),
        opset_imports=[
            helper.make_opsetid(domain, v) for domain, v in [("", opset), *((d, 1) for d in domains)]
        ],
        ir_version=8,
    )
    return from_proto(proto)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
