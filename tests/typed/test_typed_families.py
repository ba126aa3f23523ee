"""Every graph family in every format: valid, runnable, and still the user's model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import onnx
import pytest
from typed_tools import BFLOAT, FLOAT, HALF, INT64, Feeds, Rewritten, apply_as, rewrite, whole

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.plan.schema import Plan
from fixtures.graphs import GRAPHS, GraphFixture, bert, cnn, conformer, detector, gpt2, llama, vit

FAMILIES: dict[str, Callable[[], GraphFixture]] = {
    **GRAPHS,
    **{f"{make.__name__}-13": partial(make, opset=13) for make in (bert, gpt2, vit)},
    **{f"{make.__name__}-11": partial(make, opset=11) for make in (cnn, detector)},
    **{f"{make.__name__}-21": partial(make, opset=21) for make in (gpt2, conformer, cnn)},
    **{f"{make.__name__}-norm": partial(make, norm="fused") for make in (bert, llama, conformer)},
    **{
        f"{make.__name__}-fused": partial(make, norm="fused", attention="fused")
        for make in (bert, gpt2, llama, vit)
    },
    "bert-contrib": partial(bert, attention="contrib"),
}

PLANS = {
    "fp16": Plan(default="fp16"),
    "bf16": Plan(default="bf16"),
    "int8": Plan(default="int8"),
    "int8+fp16": Plan(default="int8", base="fp16"),
    "int8+bf16": Plan(default="int8", base="bf16"),
}

PRODUCTS = ("MatMul", "Gemm", "Conv")

LARGEST_ERROR = {
    "fp16": 3e-3,
    "bf16": 3e-2,
    "int8": 5e-2,
    "int8+fp16": 5e-2,
    "int8+bf16": 7e-2,
    "mixed": 7e-2,
}
"""Relative L2 at the output. Two blocks of roundings of 2^-11, 2^-8 and a hundredth of the range."""


@cache
def family(name: str) -> tuple[Model, Feeds]:
    """The model with metadata on every node, as torch's exporter leaves it, and one batch."""
    fixture = FAMILIES[name]()
    for node in fixture.model.graph.node:
        node.metadata_props.add(key="namespace", value=f"model{node.name}")
        node.doc_string = f"from {node.name}"
    fixture.model.metadata_props.add(key="author", value="somebody")
    return from_proto(fixture.model), fixture.batch()


@cache
def rewritten(name: str, plan: str) -> Rewritten:
    model, feeds = family(name)
    if plan != "mixed":
        return rewrite(model, PLANS[plan], feeds)
    formats = dict(rewrite(model, PLANS["fp16"]).formats)
    rng = np.random.default_rng(3)
    for layer, fmt in formats.items():
        if fmt == "fp16":
            more = ["int8"] if model.layer_by_id[layer].op_type in PRODUCTS else []
            formats[layer] = str(rng.choice(["fp32", "fp16", "bf16", *more]))
    return apply_as(model, formats, feeds, base="fp16")


cases = pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name in FAMILIES for plan in (*PLANS, "mixed")]
)


def emulated(case: Rewritten, feeds: Feeds, outputs: list[str] | None = None) -> dict[str, np.ndarray]:
    emulation = emulate(case.typed.model)
    proto = emulation.proto
    for name in outputs or ():
        proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    return Session(proto, emulation.weights).run(feeds)


@cases
def test_is_valid_and_runs(name: str, plan: str) -> None:
    model, feeds = family(name)
    case = rewritten(name, plan)
    onnx.checker.check_model(whole(case.typed), full_check=True)
    reference = Session(model.proto, model.weights).run(feeds)
    found = [emulated(case, feeds)]
    if BFLOAT not in case.elem_types.values():  # ONNX Runtime has hardly any BF16 kernels
        found.append(Session(case.typed.proto, case.typed.weights).run(feeds))
    for values in found:
        for output, expected in reference.items():
            assert values[output].dtype == np.float32
            error = np.linalg.norm(values[output] - expected) / np.linalg.norm(expected)
            assert error < LARGEST_ERROR[plan]


@cases
def test_keeps_what_the_user_knows(name: str, plan: str) -> None:
    model, _ = family(name)
    case = rewritten(name, plan)
    proto = case.typed.proto
    assert proto.graph.input == model.proto.graph.input
    assert [(v.name, v.type) for v in proto.graph.output] == [
        (v.name, v.type) for v in model.proto.graph.output
    ]
    for node in model.proto.graph.node:
        kept = case.node[node.name]
        assert kept.op_type == node.op_type
        assert kept.metadata_props == node.metadata_props
        assert kept.doc_string == node.doc_string
    assert proto.metadata_props == model.proto.metadata_props
    added = [n for n in proto.graph.node if n.name not in model.layer_by_id]
    assert all(node.name.startswith("trtdiag/") for node in added)
    assert len({node.name for node in proto.graph.node}) == len(proto.graph.node)
    assert set(case.typed.formats) == {layer.id for layer in model.layers}


@cases
def test_initializers_keep_their_names_and_are_converted_once(name: str, plan: str) -> None:
    model, _ = family(name)
    case = rewritten(name, plan)
    made = {t.name: t.data_type for t in case.typed.proto.graph.initializer}
    gone = set(model.initializers) - made.keys()
    readers = {n: [x for x in model.layers if n in x.inputs] for n in gone}
    for tensor, layers in readers.items():
        codes = f"{tensor}/int8" in made or any(m.startswith(f"{tensor}/int8@") for m in made)
        forms = [f for f in ("fp16", "bf16") if f"{tensor}/{f}" in made]
        assert codes or len(forms) > 1 or not layers, tensor  # else it is in one format and keeps its name
    for tensor in made.keys() & model.initializers.keys():
        halves = [f"{tensor}/{f}" for f in ("fp16", "bf16") if f"{tensor}/{f}" in made]
        assert not halves or made[tensor] == FLOAT


@cases
def test_casts_are_few(name: str, plan: str) -> None:
    case = rewritten(name, plan)
    types, producer = case.elem_types, case.producer
    casts = [n for n in case.typed.proto.graph.node if n.op_type == "Cast" and n.name.startswith("trtdiag/")]
    wanted = [(n.input[0], n.attribute[0].i) for n in casts]
    assert len(set(wanted)) == len(wanted)
    readers = {name for n in case.typed.proto.graph.node for name in n.input}
    readers |= {v.name for v in case.typed.proto.graph.output}
    for node in casts:
        assert node.output[0] in readers
        source = producer.get(node.input[0])
        assert source is None or source.op_type != "Cast" or source not in casts
        assert types.get(node.input[0], FLOAT) != node.attribute[0].i  # it converts
        assert {types.get(node.input[0], FLOAT), node.attribute[0].i} <= {FLOAT, HALF, BFLOAT}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", ["fp16", "bf16", "int8+fp16", "mixed"])
def test_shapes_and_indices_stay_exact(name: str, plan: str) -> None:
    model, _ = family(name)
    case = rewritten(name, plan)
    integers = [n for n, t in case.elem_types.items() if t == INT64 and n in model.producers]
    probe = onnx.ModelProto()
    probe.CopyFrom(model.proto)
    for tensor in integers:
        if tensor not in model.outputs:
            probe.graph.output.append(onnx.helper.make_empty_tensor_value_info(tensor))
    session = Session(probe, model.weights)
    for rows, length in ((1, 7), (3, 12)):
        feeds = {
            n: (v[:, :length] if v.dtype == np.int64 or n == "features" else v)
            for n, v in FAMILIES[name]().batch(rows).items()
        }
        expected = session.run(feeds)
        found = emulated(case, feeds, [n for n in integers if n not in model.outputs])
        for tensor in integers:
            assert np.array_equal(expected[tensor], found[tensor]), tensor


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("plan", "elem_type"), [("fp16", HALF), ("bf16", BFLOAT)])
def test_every_float_layer_is_lowered(name: str, plan: str, elem_type: int) -> None:
    """Each layer that depends on the data writes the format, but for what ONNX Runtime's operators are."""
    model, _ = family(name)
    case = rewritten(name, plan)
    foreign = [layer.id for layer in model.layers if layer.domain]
    types = case.elem_types
    for layer, fmt in case.formats.items():
        node = case.node[layer]
        if fmt == plan and layer not in foreign:
            assert case.typed.formats[layer] == plan
            assert {types[name] for name in node.output} == {elem_type}, layer
    assert len(case.typed.notes) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_int8_quantizes_every_product_and_nothing_else(name: str) -> None:
    case = rewritten(name, "int8")
    producer = case.producer
    for node in case.typed.proto.graph.node:
        quantized = [producer[n].op_type == "DequantizeLinear" for n in node.input[:2] if n in producer]
        if node.op_type in PRODUCTS:
            assert quantized == [True, True]
        else:
            assert not any(quantized) or node.op_type == "DequantizeLinear"
    assert set(case.elem_types.values()).isdisjoint({HALF, BFLOAT})
