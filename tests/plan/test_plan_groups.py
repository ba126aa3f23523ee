"""Groups found from the graph, and how a pin on one layer moves its group."""

from __future__ import annotations

import numpy as np
import pytest
from plan_graphs import (
    ATTENTION_BLOCKS,
    ATTENTION_NORM,
    ATTENTION_QKV,
    ATTENTION_ROLES,
    FLOAT,
    Model,
    attention,
    convolutions,
    model,
    node,
    weight,
)

from diag.errors import PlanError
from diag.plan.groups import Group, find_groups
from diag.plan.resolve import Resolved, resolve
from diag.plan.schema import Plan

NORM = frozenset(ATTENTION_NORM)


def resolved(
    default: str, *pins: dict[str, object], base: str = "fp32", graph: Model | None = None
) -> Resolved:
    plan = Plan.model_validate({"default": default, "base": base, "pins": pins})
    if graph is not None:
        return resolve(plan, graph, {}, {}, ())
    return resolve(plan, attention(), ATTENTION_ROLES, ATTENTION_BLOCKS, [NORM])


def of_format(found: Resolved, name: str) -> set[str]:
    return {layer for layer, format_ in found.formats.items() if format_ == name}


def test_all_groups_of_an_attention_block() -> None:
    assert find_groups(attention(), [NORM]) == (
        Group("norm", ATTENTION_NORM),
        Group("shared_input", ATTENTION_QKV, ("h",)),
        Group("add_inputs", ("res",), ("attn", "x")),
    )


def test_a_norm_of_one_layer_is_no_group_and_constants_are_no_members() -> None:
    parts = [frozenset({"softmax"}), frozenset({"shape", "take", "eps", "sqrt"})]
    assert [group.layers for group in find_groups(attention(), parts)][:1] == [("eps", "sqrt")]


def test_convolutions_of_unequal_windows_are_not_merged() -> None:
    assert find_groups(convolutions(), []) == (
        Group("shared_input", ("conv_a", "conv_b"), ("x",)),
        Group("add_inputs", ("add",), ("a", "b")),
        Group("concat_inputs", ("concat",), ("sum", "c")),
    )


def test_projections_behind_reshapes_share_their_input() -> None:
    """As torch's dynamo exporter writes them: each linear layer flattens the input for itself."""
    nodes = [
        node("Reshape", "x flat", "x1", "r1"),
        node("Gemm", "x1 w", "a", "g1"),
        node("Identity", "x", "x2", "i2"),
        node("Reshape", "x2 flat", "x3", "r2"),
        node("Gemm", "x3 w", "b", "g2"),
        node("Transpose", "x", "xt", "t", perm=[0, 2, 1]),
        node("Reshape", "xt flat", "x4", "r4"),
        node("Gemm", "x4 w", "c", "g3"),
    ]
    constants = {"w": weight(4, 4), "flat": np.array([-1, 4], np.int64)}
    graph = model(nodes, {"x": (FLOAT, [2, 4, 4])}, ["a", "b", "c"], constants)
    assert [g.layers for g in find_groups(graph, []) if g.kind == "shared_input"] == [("g1", "g2")]


def test_products_of_two_activations_are_not_merged() -> None:
    nodes = [node("MatMul", "x y", "a", "m1"), node("MatMul", "x z", "b", "m2")]
    inputs = {name: (FLOAT, [2, 2]) for name in "xyz"}
    assert find_groups(model(nodes, inputs, ["a", "b"]), []) == ()


def test_a_shared_weight_is_no_shared_input() -> None:
    nodes = [node("MatMul", "w x", "a", "m1"), node("MatMul", "w y", "b", "m2")]
    inputs = {name: (FLOAT, [2, 2]) for name in "xy"}
    assert find_groups(model(nodes, inputs, ["a", "b"], {"w": weight(2, 2)}), []) == ()


def test_cross_attention_is_cut_at_blocks() -> None:
    nodes = [node("MatMul", "x w", f"y{i}", f"m{i}") for i in range(4)]
    graph = model(nodes, {"x": (FLOAT, [2, 2])}, [f"y{i}" for i in range(4)], {"w": weight(2, 2)})
    blocks = {"m0": 0, "m1": 0, "m2": 1, "m3": 1}
    assert [g.layers for g in find_groups(graph, [], blocks)] == [("m0", "m1"), ("m2", "m3")]
    assert [g.layers for g in find_groups(graph, [])] == [("m0", "m1", "m2", "m3")]


@pytest.mark.parametrize("target", [{"match": "k"}, {"match": "re:^v$"}, {"op_type": "MatMul", "match": "q"}])
def test_a_pin_on_one_projection_moves_all_three_and_says_so(target: dict[str, object]) -> None:
    found = resolved("int8", {**target, "format": "fp16"})
    assert of_format(found, "fp16") == set(ATTENTION_QKV)
    assert of_format(found, "int8") == {"qk", "pv", "out"}
    pin = found.pins[0]
    assert len(pin.matched) == 1
    assert set(pin.matched) | set(pin.spread) == set(ATTENTION_QKV) == set(pin.layers)
    assert found.groups == (Group("shared_input", ATTENTION_QKV, ("h",), "fp16", pin.target),)


def test_quantizing_one_projection_quantizes_all_three() -> None:
    assert of_format(resolved("fp32", {"match": "k", "format": "int8"}), "int8") == set(ATTENTION_QKV)


def test_a_pin_that_stands_alone_moves_nothing_else() -> None:
    found = resolved("int8", {"match": "k", "format": "fp16", "alone": True})
    assert of_format(found, "fp16") == {"k"}
    assert found.groups == ()
    found = resolved("fp16", {"match": "pow", "format": "fp32", "alone": True})
    assert of_format(found, "fp32") & NORM == {"pow"}


@pytest.mark.parametrize("name", ["pv", "qk", "out", "softmax"])
def test_layers_outside_groups_move_alone(name: str) -> None:
    found = resolved("int8", {"match": name, "format": "fp16"})
    assert of_format(found, "fp16") == {name}
    assert found.groups == ()


@pytest.mark.parametrize("target", [{"match": "pow"}, {"role": "norm"}, {"op_type": "Sqrt"}])
def test_the_parts_of_a_norm_move_together(target: dict[str, object]) -> None:
    found = resolved("fp16", {**target, "format": "fp32"})
    assert of_format(found, "fp32") & set(ATTENTION_ROLES) == NORM
    assert [(g.kind, g.layers, g.format) for g in found.groups] == [("norm", ATTENTION_NORM, "fp32")]


def test_a_quantized_part_of_a_norm_does_not_draw_in_the_others() -> None:
    found = resolved("fp32", {"op_type": "Add", "format": "int8"})
    assert of_format(found, "int8") == {"eps", "res"}
    assert found.pins[0].spread == ()
    assert found.groups == (Group("add_inputs", ("res",), ("attn", "x"), "int8", "op_type 'Add'"),)


def test_joins_count_only_when_they_are_quantized() -> None:
    assert resolved("fp16", graph=convolutions()).groups == ()
    assert resolved("int8", {"op_type": "Add", "format": "fp16"}, graph=convolutions()).groups == ()
    found = resolved("int8", {"match": "concat", "format": "int8"}, graph=convolutions())
    assert found.groups == (Group("concat_inputs", ("concat",), ("sum", "c"), "int8", "match 'concat'"),)


def test_a_writer_of_a_join_does_not_move_the_other() -> None:
    """A join is quantized at its own inputs, so the formats of the layers before it are free."""
    found = resolved(
        "int8",
        {"op_type": "Add", "format": "int8"},
        {"match": "conv_c", "format": "fp16"},
        graph=convolutions(),
    )
    assert of_format(found, "fp16") == {"conv_c"}
    assert of_format(found, "int8") == {"conv_a", "conv_b", "add"}


def test_the_last_pin_that_touches_a_group_has_it() -> None:
    pins = [{"match": "q", "format": "fp16"}, {"match": "re:^k$", "format": "bf16"}]
    found = resolved("int8", *pins)
    assert of_format(found, "bf16") == set(ATTENTION_QKV)
    assert [pin.layers for pin in found.pins] == [(), ATTENTION_QKV]
    assert [(g.format, g.moved_by) for g in found.groups] == [("bf16", "match 're:^k$'")]


CONTRADICTIONS = [
    (
        [{"match": "q", "format": "fp16"}, {"match": "v", "format": "bf16"}],
        "pins 1 (match 'q': fp16) and 2 (match 'v': bf16) contradict each other: their layers move together "
        "(shared_input). Keep one of them, or give one of them `alone: true`.",
    ),
    (
        [
            {"match": "sqrt", "format": "fp32"},
            {"role": "norm", "format": "fp16"},
            {"match": "pow", "format": "bf16"},
        ],
        "pins 1 (match 'sqrt': fp32) and 3 (match 'pow': bf16) contradict each other: their layers move "
        "together (norm). Keep one of them, or give one of them `alone: true`.",
    ),
    (
        [{"match": "out", "format": "fp16"}, {"match": "out", "block": 0, "format": "int8"}],
        "pins 1 (match 'out': fp16) and 2 (match 'out' and block 0: int8) contradict each other: "
        "both name that layer. Keep one of them.",
    ),
]


@pytest.mark.parametrize(("pins", "sentence"), CONTRADICTIONS, ids=["qkv", "norm", "layer"])
def test_contradictions_name_both_pins(pins: list[dict[str, object]], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolved("int8", *pins)
    assert str(caught.value) == sentence


def test_what_is_no_contradiction() -> None:
    alone = {"match": "q", "format": "fp16", "alone": True}
    found = resolved("int8", {"match": "v", "format": "bf16"}, alone)
    assert (found.formats["q"], found.formats["k"], found.formats["v"]) == ("fp16", "bf16", "bf16")
    found = resolved("int8", {"match": "q", "format": "fp16"}, {"match": "k", "format": "fp16"})
    assert of_format(found, "fp16") == set(ATTENTION_QKV)
    found = resolved("fp16", {"match": "eps", "format": "int8"}, {"match": "pow", "format": "int8"})
    assert of_format(found, "int8") == {"eps", "pow"}
