"""INT8 over FP16, said in several ways: models that tell apart why an engine differs from its emulation.

    python -m benchmarks.int8_fp16_variants MODEL --calibration TABLE --data DATA --out OUT

writes `OUT/NAME.onnx` for each variant (and `OUT/NAME.yaml` where a plan alone says it), and prints how far
each is from the FP32 model when ONNX Runtime emulates it. Those that quantize the same layers differ by the
rounding of scales and products only: an engine that does what the graph says makes them equally good.

| variant | what is different | it is good and `today` is not: |
|---|---|---|
| `today` | FP16 scales, products in FP16 | - |
| `fp32-scales` | Q/DQ with FP32 scales, Cast to FP16 behind them | the scales' own type is to blame |
| `fp32-products` | INT8 products give FP32, everything else FP16 | products of scales, or the FP16 epilogue |
| `large-scales` | weight scales times 2^k, the product times 2^-k | subnormal products of two FP16 scales |
| `attention-fp16` | QK and PV in FP16 | the INT8 attention fusion |
| `attention-only` | nothing but QK and PV in INT8 | the INT8 products with weights |
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from diag.engines.emulation import Emulation, emulate
from diag.engines.onnxruntime import Array, Session
from diag.feeds import Feeds, open_feeds
from diag.model.graph import LINEAR_OPS, Model
from diag.model.save import save_model
from diag.pipeline.prepare import Planned, plan_on, read_scales
from diag.plan.schema import Pin, Plan, plan_for_format, write_plan
from diag.typed.apply import TypedModel

_ATTENTION = ("qk_matmul", "pv_matmul")
_LEAST_PRODUCT = 2.0**-12
"""Products of scales below this are raised: the smallest normal FP16 is 2^-14."""
_MOST_SHIFT = 8
"""Outputs grow by 2^k before they shrink again, and must stay in FP16."""

INT8_FP16 = plan_for_format("int8").model_copy(update={"base": "fp16"})
_FP16 = plan_for_format("fp16")


def _pinned(plan: Plan, fmt: str, **targets: Sequence[str]) -> Plan:
    found = [{key: name, "format": fmt} for key, names in targets.items() for name in names]
    return plan.model_copy(update={"pins": tuple(Pin.model_validate(pin) for pin in found)})


PLANS = {
    "today": INT8_FP16,
    "fp32-products": _pinned(_FP16, "int8", op_type=sorted(LINEAR_OPS)),
    "attention-fp16": _pinned(INT8_FP16, "fp16", role=_ATTENTION),
    "attention-only": _pinned(_FP16.model_copy(update={"base": "fp16"}), "int8", role=_ATTENTION),
}
"""Variants that a plan says; those that need the graph changed by hand start from one of these."""


def variants(planned: Planned, table_path: str) -> Iterator[tuple[str, TypedModel]]:
    """Each variant of the model, by name."""
    made: dict[str, TypedModel] = {}
    for name, plan in PLANS.items():
        fitted = planned.with_plan(_fitting(plan, planned))
        made[name] = fitted.apply(read_scales(fitted, table_path))
        yield name, made[name]
    yield "fp32-scales", fp32_scales(made["fp32-products"])
    yield "large-scales", large_scales(made["today"])


def _fitting(plan: Plan, planned: Planned) -> Plan:
    """The plan without pins that match nothing in this model."""
    pins = tuple(pin for pin in plan.pins if planned.resolver.targets.match(pin))
    return plan.model_copy(update={"pins": pins})


def fp32_scales(typed: TypedModel) -> TypedModel:
    """From FP32 products: each is made FP16 by a Cast behind its dequantizers."""
    proto = _copy(typed.proto)
    nodes: list[NodeProto] = []
    narrowed: dict[str, str] = {}
    for node in proto.graph.node:
        if _is_quantized(node, proto.graph):
            nodes.extend(_cast_inputs(node, 2, TensorProto.FLOAT16))
            if len(node.input) > 2 and node.input[2]:
                nodes.extend(_cast_inputs(node, 3, TensorProto.FLOAT16, first=2))
            wide, node.output[0] = node.output[0], f"{node.output[0]}/narrow"
            narrowed[wide] = node.output[0]
            nodes.append(node)
            nodes.append(helper.make_node("Cast", [node.output[0]], [wide], f"{node.name}/wide", to=1))
        else:
            nodes.append(node)
    replace_nodes(proto.graph, _without_round_trips(nodes, narrowed))
    return TypedModel(proto, typed.weights, typed.formats, typed.notes)


def _cast_inputs(node: NodeProto, stop: int, to: int, first: int = 0) -> Iterator[NodeProto]:
    for index in range(first, stop):
        source = node.input[index]
        node.input[index] = f"{source}/for/{node.name}/{index}"
        yield helper.make_node("Cast", [source], [node.input[index]], f"{node.input[index]}/cast", to=to)


def _without_round_trips(nodes: list[NodeProto], narrowed: dict[str, str]) -> list[NodeProto]:
    """Casts of a widened product back to FP16 read the product itself."""
    for node in nodes:
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        if node.op_type == "Cast" and to == TensorProto.FLOAT16 and node.input[0] in narrowed:
            node.op_type, node.input[0] = "Identity", narrowed[node.input[0]]
            del node.attribute[:]
    read = {name for node in nodes for name in node.input}
    return [
        n
        for n in nodes
        if not (n.name.endswith("/wide") and n.output[0] in narrowed and n.output[0] not in read)
    ]


def large_scales(typed: TypedModel) -> TypedModel:
    """Weight scales times a power of two that makes their products with the activation's scale normal."""
    proto, weights = _copy(typed.proto), dict(typed.weights)
    values = typed.model.constants
    producer = {name: node for node in proto.graph.node for name in node.output}
    scales = {t.name: t for t in proto.graph.initializer}
    nodes: list[NodeProto] = []
    readers = Counter(name for node in proto.graph.node for name in node.input)
    for node in proto.graph.node:
        nodes.append(node)
        pair = [producer.get(name) for name in node.input[:2]] if _is_quantized(node, proto.graph) else []
        weight = next((p for p in pair if p is not None and p.input[0] in scales), None)
        other = next((p for p in pair if p is not None and p.input[0] not in scales), None)
        if weight is None or other is None or readers[weight.output[0]] > 1:
            continue
        scale, step = values[weight.input[1]], values[other.input[1]]
        least = float(scale.astype(np.float64).min() * step.astype(np.float64))
        shift = math.ceil(math.log2(_LEAST_PRODUCT / least))
        if shift > 0:
            nodes.append(_shifted(proto.graph, node, scales[weight.input[1]], scale, min(shift, _MOST_SHIFT)))
            weights.pop(weight.input[1], None)
    replace_nodes(proto.graph, nodes)
    return TypedModel(proto, weights, typed.formats, typed.notes)


def _shifted(graph: GraphProto, node: NodeProto, scale: TensorProto, values: Array, shift: int) -> NodeProto:
    scale.CopyFrom(
        numpy_helper.from_array((values.astype(np.float64) * 2.0**shift).astype(values.dtype), scale.name)
    )
    factor = numpy_helper.from_array(np.array(2.0**-shift, values.dtype), f"{node.name}/unshift")
    graph.initializer.append(factor)
    result, node.output[0] = node.output[0], f"{node.output[0]}/shifted"
    return helper.make_node("Mul", [node.output[0], factor.name], [result], f"{node.name}/unshift/mul")


def _is_quantized(node: NodeProto, graph: GraphProto) -> bool:
    made = {name: n.op_type for n in graph.node for name in n.output} if node.op_type in LINEAR_OPS else {}
    return bool(made) and all(made.get(name) == "DequantizeLinear" for name in node.input[:2])


def _copy(proto: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(proto)
    del copy.graph.value_info[:]
    return copy


def replace_nodes(graph: GraphProto, nodes: list[NodeProto]) -> None:
    """Put nodes in place of the graph's; some may be the graph's own."""
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def emulated(typed: TypedModel, feeds: Feeds) -> list[dict[str, Array]]:
    """Outputs of each batch, every tensor rounded to its format."""
    return outputs(emulate(typed.model), feeds)


def outputs(model: Model | Emulation, feeds: Feeds) -> list[dict[str, Array]]:
    """Outputs of each batch."""
    session = Session(model.proto, model.weights)
    return [session.run(feed) for feed in feeds]


def errors_in_words(reference: list[dict[str, Array]], got: list[dict[str, Array]]) -> str:
    """`relative_l2` of each output."""
    errors = ", ".join(f"{name} {relative_l2(reference, got, name):.4f}" for name in reference[0])
    return f"relative L2 to FP32: {errors}"


def relative_l2(reference: list[dict[str, Array]], got: list[dict[str, Array]], name: str) -> float:
    """Norm of the difference over the norm of the reference, over all batches."""
    pairs = [
        (a[name].astype(np.float64), b[name].astype(np.float64)) for a, b in zip(reference, got, strict=True)
    ]
    return math.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((a**2).sum() for a, _ in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=2)
    given = parser.parse_args()
    planned = plan_on(given.model, INT8_FP16)
    feeds = open_feeds(given.data, planned.model.inputs, given.limit)
    reference = outputs(planned.model, feeds)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, typed in variants(planned, given.calibration):
        save_model(typed.proto, typed.weights, given.out / f"{name}.onnx")
        if name in PLANS:
            write_plan(_fitting(PLANS[name], planned), given.out / f"{name}.yaml")
        print(f"{name}: {errors_in_words(reference, emulated(typed, feeds))}", flush=True)


if __name__ == "__main__":
    main()
