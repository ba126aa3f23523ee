"""Formats for every layer: the fixed meanings of `default`, and last pin wins against brute force."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_graphs import (
    ATTENTION_BLOCKS,
    ATTENTION_FLOAT,
    ATTENTION_MATMUL,
    ATTENTION_NORM,
    ATTENTION_QKV,
    ATTENTION_ROLES,
    ATTENTION_SHAPE,
    ATTENTION_WEIGHTED,
    FLOAT,
    INT64,
    attention,
    model,
    node,
    weight,
)

from diag.errors import PlanError
from diag.plan.resolve import Resolver, resolve
from diag.plan.schema import Plan, plan_for_format

ATTENTION = attention()
RESOLVER = Resolver.of(ATTENTION, ATTENTION_ROLES, ATTENTION_BLOCKS, [frozenset(ATTENTION_NORM)])


def formats(default: str, *pins: dict[str, object], base: str = "fp32") -> dict[str, str]:
    plan = Plan.model_validate({"default": default, "base": base, "pins": pins})
    return dict(RESOLVER.resolve(plan).formats)


def test_every_layer_gets_a_format_in_graph_order() -> None:
    found = resolve(plan_for_format("fp16"), ATTENTION, {}, {}, ())
    assert list(found.formats) == [layer.id for layer in ATTENTION.layers]
    assert {found.formats[layer] for layer in ATTENTION_SHAPE} == {"fp32"}


@pytest.mark.parametrize("default", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("base", ["fp32", "fp16"])
def test_a_float_default_means_all_float_layers(default: str, base: str) -> None:
    expected = dict.fromkeys(ATTENTION_SHAPE, "fp32") | dict.fromkeys(ATTENTION_FLOAT, default)
    assert formats(default, base=base) == expected


@pytest.mark.parametrize(
    ("default", "lowered"),
    [
        ("int8", ATTENTION_MATMUL),
        ("fp8", ATTENTION_MATMUL),
        ("tf32", ATTENTION_MATMUL),
        ("int4", ATTENTION_WEIGHTED),
        ("mxfp8", ATTENTION_WEIGHTED),
        ("nvfp4", ATTENTION_WEIGHTED),
    ],
)
@pytest.mark.parametrize("base", ["fp32", "fp16", "bf16"])
def test_an_operand_default_means_operands_and_the_rest_is_base(
    default: str, lowered: tuple[str, ...], base: str
) -> None:
    expected = dict.fromkeys(ATTENTION_SHAPE, "fp32")
    expected |= dict.fromkeys(ATTENTION_FLOAT, base) | dict.fromkeys(lowered, default)
    assert formats(default, base=base) == expected


def test_a_quantizing_pin_means_what_the_default_means_when_it_can() -> None:
    for target in ({"block": 0}, {"match": "re:."}, {"match": "glob:*"}):
        assert formats("fp32", {**target, "format": "int8"}) == formats("int8"), target
    found = formats("fp16", {"match": "re:^(softmax|pv)$", "format": "int8"})
    assert {layer for layer, name in found.items() if name == "int8"} == {"pv"}
    assert found["softmax"] == "fp16"


def test_a_quantizing_pin_that_matches_no_such_operator_means_what_it_matches() -> None:
    for target in (
        {"match": "softmax"},
        {"op_type": "Softmax"},
        {"role": "attn_softmax"},
        {"match": "glob:s*x"},
    ):
        found = formats("fp16", {**target, "format": "int8"})
        assert {layer for layer, name in found.items() if name == "int8"} == {"softmax"}


REFUSED = [
    (
        {"match": "shape", "format": "fp16"},
        "pin 1 (match 'shape') matches only layers that keep their types: constants, shape and index "
        "arithmetic, subgraphs or quantizers. Pin a layer that reads their outputs.",
    ),
    (
        {"op_type": "Concat", "format": "int8"},
        "pin 1 (op_type 'Concat') matches only layers that keep their types: constants, shape and index "
        "arithmetic, subgraphs or quantizers. Pin a layer that reads their outputs.",
    ),
    (
        {"match": "pv", "format": "int4"},
        "pin 1 (match 'pv') asks for int4, which is for MatMul and Gemm layers with constant weights on "
        "the right, and matches none. Choose another format.",
    ),
    (
        {"match": "softmax", "format": "tf32"},
        "pin 1 (match 'softmax') asks for tf32, which is for Conv, ConvTranspose, Gemm and MatMul layers, "
        "and matches none. Choose another format.",
    ),
]


@pytest.mark.parametrize(("pin", "sentence"), REFUSED, ids=[str(pin) for pin, _ in REFUSED])
def test_what_cannot_be_is_refused(pin: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        formats("fp32", pin)
    assert str(caught.value) == sentence


def test_a_layer_without_float_inputs_takes_no_scales() -> None:
    graph = model(
        [node("Cast", "ids", "f", "cast", to=FLOAT), node("Mul", "f c", "y", "mul")],
        {"ids": (INT64, [2])},
        ["y"],
        {"c": np.float32(2)},
    )
    plan = Plan.model_validate({"default": "fp16", "pins": [{"match": "cast", "format": "int8"}]})
    with pytest.raises(PlanError) as caught:
        resolve(plan, graph, {}, {}, ())
    assert str(caught.value) == (
        "pin 1 (match 'cast') asks for int8, which is for layers that read floating-point tensors, "
        "and matches none. Choose another format."
    )


def test_pins_tell_what_they_did() -> None:
    plan = Plan.model_validate(
        {
            "default": "int8",
            "pins": [
                {"role": "attn_softmax", "format": "fp16", "reason": "range"},
                {"block": 0, "format": "fp32"},
                {"match": "pv", "format": "bf16"},
            ],
        }
    )
    first, second, third = RESOLVER.resolve(plan).pins
    assert (first.index, first.target, first.format, first.reason) == (
        0,
        "role 'attn_softmax'",
        "fp16",
        "range",
    )
    assert (first.matched, first.spread, first.layers) == (("softmax",), (), ())
    assert second.matched == ATTENTION_ORDER
    assert second.layers == tuple(layer for layer in ATTENTION_ORDER if layer != "pv")
    assert third.layers == ("pv",)


ATTENTION_ORDER = tuple(layer.id for layer in ATTENTION.layers if layer.id in ATTENTION_FLOAT)

# Targets with their layers, written by hand.
Target = tuple[dict[str, object], set[str]]
TARGETS: list[Target] = [
    ({"match": "glob:*"}, set(ATTENTION_FLOAT)),
    ({"block": "0-3"}, set(ATTENTION_FLOAT)),
    ({"match": "re:^[qk]"}, {"q", "k", "qk", "kt"}),
    ({"match": "re:^s"}, {"sqrt", "softmax"}),
    ({"role": "qkv_proj"}, {"q", "k", "v"}),
    ({"role": "norm"}, set(ATTENTION_NORM)),
    ({"role": "norm", "op_type": "Mul"}, {"gain"}),
    ({"op_type": "MatMul"}, set(ATTENTION_MATMUL)),
    ({"op_type": "Add"}, {"eps", "res"}),
    ({"op_type": "Add", "role": "residual_add"}, {"res"}),
    ({"match": "glob:v"}, {"v"}),
    ({"match": "glob:out*"}, {"out_reshape", "out"}),
    ({"match": "glob:pow"}, {"pow"}),
]
FORMATS = ["fp32", "fp16", "bf16", "int8", "fp8"]
pins = st.tuples(st.sampled_from(TARGETS), st.sampled_from(FORMATS), st.booleans())


def by_hand(default: str, base: str, chosen: list[tuple[Target, str, bool]]) -> dict[str, str]:
    """The documented meaning, layer by layer: walk the pins from the last to the first."""
    found = {}
    for layer in (*ATTENTION_FLOAT, *ATTENTION_SHAPE):
        plain = default in ("fp32", "fp16", "bf16")
        found[layer] = default if plain or layer in ATTENTION_MATMUL else base
        if layer in ATTENTION_SHAPE:
            found[layer] = "fp32"
        for (_, layers), format_, alone in reversed(chosen):
            scaled = format_ in ("int8", "fp8")
            meant = layers & set(ATTENTION_MATMUL) or layers if scaled else layers
            together = [set(ATTENTION_QKV)] if scaled else [set(ATTENTION_QKV), set(ATTENTION_NORM)]
            drawn = any(layer in group and group & meant for group in together) and not alone
            if layer in meant or drawn:
                found[layer] = format_
                break
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["fp32", "fp16"]),
    st.lists(pins, max_size=5, unique_by=lambda pin: str(pin[0][0])),
)
def test_the_last_matching_pin_wins(default: str, base: str, chosen: list[tuple[Target, str, bool]]) -> None:
    given_pins = [{**target, "format": name, "alone": alone} for (target, _), name, alone in chosen]
    plan = Plan.model_validate({"default": default, "base": base, "pins": given_pins})
    found = RESOLVER.resolve(plan)
    assert found.formats == by_hand(default, base, chosen)
    held = [layer for pin in found.pins for layer in pin.layers]
    assert len(held) == len(set(held))
    for pin in found.pins:
        assert all(found.formats[layer] == pin.format for layer in pin.layers)
    for group in found.groups:
        assert {found.formats[layer] for layer in group.layers} == {group.format}


def test_a_large_model_is_resolved_quickly() -> None:
    """6,000 layers and 40 pins; the bound is loose, as machines are shared."""
    nodes = [
        node("MatMul" if i % 2 else "Relu", f"t{i} w" if i % 2 else f"t{i}", f"t{i + 1}", f"n{i}")
        for i in range(6000)
    ]
    graph = model(nodes, {"t0": (FLOAT, [2, 2])}, ["t6000"], {"w": weight(2, 2)})
    given_pins = [{"match": f"re:^n{i}[05]$", "format": "fp16"} for i in range(1, 41)]
    plan = Plan.model_validate({"default": "int8", "pins": given_pins})
    resolve(plan, graph, {}, {}, ())
    begun = time.process_time()
    resolve(plan, graph, {}, {}, ())
    assert time.process_time() - begun < 3
