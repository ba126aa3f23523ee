"""INT8 over FP16, emulated as an engine might do it wrong: which mistake would give which error?

    python -m benchmarks.int8_fp16_hypotheses MODEL --calibration TABLE --data DATA

prints the relative L2 error of each output against the FP32 model for

- `emulated`: each product exact, then rounded to FP16;
- `rounded`: the product of the two scales rounded to FP16 before it multiplies the INT32 sum;
- `flushed`: the same, and what is subnormal (below 2^-14) becomes 0;
- `saturated`: the INT32 sum goes through FP16 (at most 65504) before it is scaled;
- `residual`: residual Adds read what the quantizer behind their input left, not the input itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from benchmarks.int8_fp16_variants import INT8_FP16, errors_in_words, outputs, replace_nodes
from diag.engines.emulation import Emulation, emulate
from diag.feeds import open_feeds
from diag.pipeline.prepare import Planned, plan_on, read_scales
from diag.typed.passes.insert_qdq import storable, weight_scale

Products = Mapping[str, NDArray[np.float32]]
"""For each quantized layer the product of its two scales, shaped to multiply the layer's output."""

FP16_MAX, FP16_NORMAL = np.float32(65504), np.float32(2.0**-14)


def products(planned: Planned, scales: Mapping[str, float]) -> Products:
    """Products of scales as stored in FP16, in FP32."""
    found: dict[str, NDArray[np.float32]] = {}
    for operand in planned.operands:
        if operand.weight is None:
            scale = storable(np.asarray(scales[operand.tensor], np.float32), "fp16")
        else:
            assert operand.channel_axis is not None
            scale = weight_scale(np.asarray(operand.weight, np.float32), operand.channel_axis, "int8", "fp16")
            if planned.model.layer_by_id[operand.layer].op_type.startswith("Conv"):
                scale = scale.reshape(-1, *[1] * (operand.weight.ndim - 2))
        found[operand.layer] = found.get(operand.layer, np.float32(1)) * scale
    return found


def scaled(emulation: Emulation, factors: Products) -> Emulation:
    """Every product times a factor of its own."""
    return _behind(emulation, factors, lambda raw, factor, y: [helper.make_node("Mul", [raw, factor], [y])])


def bounded(emulation: Emulation, limits: Products) -> Emulation:
    """Every product kept within +- its limit."""

    def nodes(raw: str, limit: str, y: str) -> list[NodeProto]:
        made = [("Neg", [limit], f"{y}/low"), ("Min", [raw, limit], f"{y}/high")]
        made.append(("Max", [f"{y}/high", f"{y}/low"], y))
        return [helper.make_node(op, inputs, [output]) for op, inputs, output in made]

    return _behind(emulation, limits, nodes)


def _behind(
    emulation: Emulation, values: Products, make: Callable[[str, str, str], list[NodeProto]]
) -> Emulation:
    nodes: list[NodeProto] = []
    for node in emulation.proto.graph.node:
        nodes.append(node)
        if node.name in values:
            y, node.output[0] = node.output[0], f"{node.output[0]}/raw"
            constant = numpy_helper.from_array(np.asarray(values[node.name], np.float32), f"{y}/hypothesis")
            emulation.proto.graph.initializer.append(constant)
            nodes.extend(make(node.output[0], constant.name, y))
    return _with_nodes(emulation, nodes)


def residual(emulation: Emulation) -> Emulation:
    """Adds read the dequantized value of an input that is quantized for somebody else."""
    nodes = list(emulation.proto.graph.node)
    codes = {node.input[0]: node.output[0] for node in nodes if node.op_type == "QuantizeLinear"}
    values = {node.input[0]: node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    for node in nodes:
        for index, name in enumerate(node.input if node.op_type == "Add" else ()):
            if name in codes:
                node.input[index] = values[codes[name]]
    made = {name: i for i, node in enumerate(nodes) for name in node.output}
    needs = {i: {made[name] for name in node.input if name in made} for i, node in enumerate(nodes)}
    return _with_nodes(emulation, [nodes[i] for i in TopologicalSorter(needs).static_order()])


def _with_nodes(emulation: Emulation, nodes: list[NodeProto]) -> Emulation:
    replace_nodes(emulation.proto.graph, nodes)
    return emulation


def hypotheses(exact: Products) -> dict[str, Callable[[Emulation], Emulation]]:
    """By name, what each makes of the emulation."""
    fp16 = {layer: p.astype(np.float16).astype(np.float32) for layer, p in exact.items()}
    rounded = {layer: fp16[layer] / p for layer, p in exact.items()}
    flushed = {layer: np.where(fp16[layer] < FP16_NORMAL, 0, rounded[layer]) for layer in exact}
    limits = {layer: FP16_MAX * p for layer, p in exact.items()}
    return {
        "emulated": lambda emulation: emulation,
        "rounded": lambda emulation: scaled(emulation, rounded),
        "flushed": lambda emulation: scaled(emulation, flushed),
        "saturated": lambda emulation: bounded(emulation, limits),
        "residual": residual,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=2)
    given = parser.parse_args()
    planned = plan_on(given.model, INT8_FP16)
    table = read_scales(planned, given.calibration)
    assert table is not None
    typed = planned.apply(table)
    exact = products(planned, table.scales("int8"))
    every = np.concatenate([p.reshape(-1) for p in exact.values()])
    print(f"{np.mean(every < FP16_NORMAL):.1%} of {every.size} products of scales are subnormal in FP16")
    feeds = open_feeds(given.data, planned.model.inputs, given.limit)
    reference = outputs(planned.model, feeds)
    for name, change in hypotheses(exact).items():
        found = change(emulate(typed.model))
        print(f"{name}: {errors_in_words(reference, outputs(found, feeds))}", flush=True)


if __name__ == "__main__":
    main()
