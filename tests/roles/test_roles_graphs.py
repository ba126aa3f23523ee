"""Roles and blocks against hand-made truth, on graphs whose names mean nothing."""

from __future__ import annotations

import pytest

from diag.model.load import from_proto
from diag.roles import ROLES, attention_blocks, find_roles, norm_parts
from fixtures.graphs import Dims, bert, cnn, conformer, detector, gpt2, llama, scrambled, vit

FORMS = [
    pytest.param({"norm": norm, "attention": attention}, id=f"{norm}-norm-{attention}-attention")
    for norm in ("decomposed", "fused")
    for attention in ("decomposed", "fused")
]
VARIANTS = [
    pytest.param(bert, {"attention": "contrib"}, id="bert-contrib"),
    pytest.param(bert, {"opset": 13}, id="bert-opset13"),
    pytest.param(bert, {"dims": Dims(blocks=1)}, id="bert-one-block"),
    pytest.param(gpt2, {"dims": Dims(blocks=5, heads=2)}, id="gpt2-five-blocks"),
    pytest.param(llama, {"opset": 20}, id="llama-opset20"),
    pytest.param(llama, {"position_input": True}, id="llama-positions-fed"),
    pytest.param(llama, {"qk_norm": True, "norm": "fused"}, id="llama-qk-norm"),
    pytest.param(llama, {"qk_norm": True, "position_input": True}, id="llama-qk-norm-positions-fed"),
    pytest.param(llama, {"dims": Dims(kv_heads=4)}, id="llama-no-gqa"),
    pytest.param(vit, {"layer_scale": True}, id="vit-layer-scale"),
    pytest.param(vit, {"attention": "contrib", "norm": "fused"}, id="vit-contrib"),
    pytest.param(conformer, {"dims": Dims(blocks=3)}, id="conformer-three-blocks"),
    pytest.param(cnn, {}, id="cnn"),
    pytest.param(cnn, {"blocks": 4}, id="cnn-four-blocks"),
    pytest.param(detector, {}, id="detector"),
]


def wrong(fixture):
    """Layers whose role or block differs from the truth: name, operator, expected, found."""
    found = find_roles(from_proto(fixture.model))
    return [
        (name, fixture.node(name).op_type, expected, (found[name].name, found[name].block))
        for name, expected in fixture.truth.items()
        if (found[name].name, found[name].block) != expected
    ]


@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, conformer])
@pytest.mark.parametrize("form", FORMS)
def test_every_layer_is_right(make, form):
    assert wrong(scrambled(make(**form), seed=1)) == []


@pytest.mark.parametrize(("make", "options"), VARIANTS)
def test_variants_are_right(make, options):
    assert wrong(scrambled(make(**options), seed=2)) == []


@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, conformer, cnn, detector])
def test_every_layer_has_an_entry_and_a_known_role(make):
    model = from_proto(make().model)
    found = find_roles(model)
    assert found.keys() == {layer.id for layer in model.layers}
    assert {role.name for role in found.values()} <= set(ROLES)


def test_layers_on_shapes_alone_are_other():
    model = from_proto(llama().model)
    found = find_roles(model)
    static = [x for x in model.layers if model.value_dependent.isdisjoint(x.outputs)]
    assert {"Cos", "Sin", "LessOrEqual", "Range"} <= {x.op_type for x in static}
    assert {(found[x.id].name, found[x.id].block) for x in static} == {("other", None)}


@pytest.mark.parametrize(
    ("make", "norms", "parts"),
    [
        (bert, 5, {"ReduceMean": 2, "Sub": 1, "Pow": 1, "Add": 2, "Sqrt": 1, "Div": 1, "Mul": 1}),
        (llama, 5, {"ReduceMean": 1, "Add": 1, "Sqrt": 1, "Reciprocal": 1, "Mul": 3}),
    ],
)
def test_norm_parts_holds_each_norm_whole(make, norms, parts):
    model = from_proto(scrambled(make()).model)
    groups = norm_parts(model)
    assert len(groups) == norms
    for group in groups:
        ops = sorted(model.layer_by_id[i].op_type for i in group)
        assert ops == sorted(op for op, count in parts.items() for _ in range(count))
    everything = [i for group in groups for i in group]
    assert len(everything) == len(set(everything))
    assert {i for i, role in find_roles(model).items() if role.name == "norm"} == set(everything)


def test_fused_norms_are_groups_of_one():
    groups = norm_parts(from_proto(bert(norm="fused").model))
    assert [len(group) for group in groups] == [1] * 5


def test_attention_blocks_name_every_part():
    fixture = bert()
    model = from_proto(fixture.model)
    blocks = attention_blocks(model)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        q, k, v = ([model.layer_by_id[i].op_type for i in ids] for ids in (block.q, block.k, block.v))
        assert q == k == v == ["MatMul", "Add"]
        assert {*block.q, *block.k, *block.v} == set(fixture.nodes("qkv_proj", number))
        assert block.qk == fixture.nodes("qk_matmul", number)
        assert block.scale == fixture.nodes("attn_scale", number)
        assert block.mask == fixture.nodes("attn_mask", number)
        assert block.softmax == fixture.nodes("attn_softmax", number)
        assert block.pv == fixture.nodes("pv_matmul", number)
        assert block.out == fixture.nodes("attn_out_proj", number)
        assert len(block.parts) == 13


def test_one_projection_for_all_three_stands_in_each():
    fixture = gpt2()
    for number, block in enumerate(attention_blocks(from_proto(fixture.model))):
        assert block.q == block.k == block.v == fixture.nodes("qkv_proj", number)


def test_fused_attention_stands_for_scores_softmax_and_values():
    fixture = llama(attention="fused")
    for number, block in enumerate(attention_blocks(from_proto(fixture.model))):
        assert block.qk == block.softmax == block.pv == fixture.nodes("attn_softmax", number)
        assert [len(ids) for ids in (block.q, block.k, block.v, block.out)] == [1, 1, 1, 1]
