"""The FP32 reference, and whether it can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from diag.engines.emulation import EXACT_OPS
from diag.engines.onnxruntime import Array, Session
from diag.model.graph import Model, TensorInfo
from diag.numerics.error import MASK_LIKE, measure
from diag.numerics.metrics import error_metrics

_ULP = 2.0**-23
"""Spacing of the float32 numbers just above 1: what one more rounding can move a value by."""

_LEAST, _MOST = "trtdiag/least_move", "trtdiag/most_move"


@dataclass(frozen=True)
class Trust:
    """How far the reference's outputs move under two changes that must not matter."""

    optimisation_rel_l2: float
    jitter_rel_l2: float
    noise: Mapping[str, float]
    """Largest absolute movement of each output."""
    shape_values: Mapping[str, Array]
    """Integer tensors that depend on shapes only, as computed for the first batch."""


def examine(model: Model, feed: Mapping[str, Array], types: Mapping[str, TensorInfo], seed: int = 0) -> Trust:
    """Run one batch three times: without optimisation, with all of it, and with every tensor jittered.

    The jitter multiplies each float tensor that was rounded by 1 +- 2^-23, a random sign for each index of
    its last axis where that is known; values that stand for minus infinity stay. Raises EngineError when ONNX
    Runtime cannot run the model.
    """
    names = list(model.outputs)
    shape_tensors = _shape_tensors(model, types)
    plain = Session(with_outputs(model.proto, [*names, *shape_tensors]), model.weights).run(feed)
    optimised = Session(with_outputs(model.proto, names), model.weights, optimised=True).run(feed)
    jittered = Session(_jittered(model, types, seed), model.weights).run(feed)
    floats = [name for name in names if plain[name].dtype.kind == "f"]
    noise = {
        name: max(_max_abs(plain[name], optimised[name]), _max_abs(plain[name], jittered[name]))
        for name in floats
    }
    return Trust(
        max((_rel_l2(plain[n], optimised[n]) for n in floats), default=0.0),
        max((_rel_l2(plain[n], jittered[n]) for n in floats), default=0.0),
        noise,
        {name: plain[name] for name in shape_tensors},
    )


def with_outputs(proto: ModelProto, names: list[str]) -> ModelProto:
    """A copy of the graph with exactly these outputs."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    declared = {value.name: value for value in proto.graph.output}
    del copy.graph.output[:]
    for name in dict.fromkeys(names):
        copy.graph.output.append(declared.get(name) or helper.make_empty_tensor_value_info(name))
    return copy


def _shape_tensors(model: Model, types: Mapping[str, TensorInfo]) -> list[str]:
    """Integer results of shape arithmetic: knowing them makes every shape concrete."""
    integers = (TensorProto.INT64, TensorProto.INT32)
    return [
        name
        for layer in model.layers
        if layer.op_type != "Constant"
        for name in layer.outputs
        if name in types and name not in model.value_dependent and types[name].elem_type in integers
    ]


def _jittered(model: Model, types: Mapping[str, TensorInfo], seed: int) -> ModelProto:
    generator = np.random.default_rng(seed)
    proto = with_outputs(model.proto, list(model.outputs))
    proto.graph.initializer.append(helper.make_tensor(_MOST, TensorProto.FLOAT, (), [MASK_LIKE * _ULP / 4]))
    proto.graph.initializer.append(helper.make_tensor(_LEAST, TensorProto.FLOAT, (), [-MASK_LIKE * _ULP / 4]))
    nodes: list[NodeProto] = []
    for node in list(proto.graph.node):
        nodes.append(node)
        if node.op_type in EXACT_OPS or node.op_type == "Cast":  # a moved 0 or 1 of a mask is another mask
            continue
        for index, name in enumerate(node.output):
            info = types.get(name)
            if name in model.value_dependent and info is not None and info.elem_type == TensorProto.FLOAT:
                node.output[index] = f"{name}/still"
                step = _steps(name, info, generator)
                proto.graph.initializer.append(step)
                nodes.extend(_moved(name, step.name))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def _steps(name: str, info: TensorInfo, generator: np.random.Generator) -> TensorProto:
    last = info.shape[-1] if info.shape else None
    signs = generator.choice([-1.0, 1.0], last if isinstance(last, int) else 1)
    shape = signs.shape if info.shape else ()
    return helper.make_tensor(f"{name}/step", TensorProto.FLOAT, shape, (signs * _ULP).astype(np.float32))


def _moved(name: str, step: str) -> list[NodeProto]:
    """value + value * step, the addend bounded: a mask's -3.4e38 swallows it and stays what it is."""
    return [
        helper.make_node("Mul", [f"{name}/still", step], [f"{name}/move"], name=f"{name}/move"),
        helper.make_node("Clip", [f"{name}/move", _LEAST, _MOST], [f"{name}/bounded"], name=f"{name}/bound"),
        helper.make_node("Add", [f"{name}/still", f"{name}/bounded"], [name], name=f"{name}/jitter"),
    ]


def _rel_l2(reference: Array, other: Array) -> float:
    return error_metrics(measure(_flat(reference), _flat(other), None))["rel_l2"]


def _max_abs(reference: Array, other: Array) -> float:
    return error_metrics(measure(_flat(reference), _flat(other), None))["max_abs"]


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array, np.float32).reshape(-1)
