"""Patterns one by one: what is a norm, a rotation, an FFN, an attention, and what only looks like one."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto
from pydantic import ValidationError

from diag.model.load import from_proto
from diag.roles import attention_blocks, find_roles, norm_parts
from diag.roles.rules import RoleRules, role_rules
from fixtures.graphs.builder import GraphBuilder
from fixtures.graphs.parts import Dims, gelu_erf, layer_norm, linear, reduce_mean, split_heads
from fixtures.graphs.recipes import RECIPES

HIDDEN = 32


class Sketch(GraphBuilder):
    """A graph with one input `x` [2, 6, 32]."""

    def __init__(self, opset: int = 17) -> None:
        super().__init__("sketch", opset, 0)
        self.x = self.input("x", TensorProto.FLOAT, [2, 6, HIDDEN])

    def model(self, *outputs: str):
        for number, name in enumerate(outputs):
            self.output(name, f"y{number}", None)
        return from_proto(self.build(lambda n, seed: {}).model)


def roles_by_op(model, op):
    found = find_roles(model)
    return [found[layer.id].name for layer in model.layers if layer.op_type == op]


def ops_of(model, group):
    return sorted(model.layer_by_id[i].op_type for i in group)


def test_norm_as_tensorflow_spells_it():
    b = Sketch()
    mean = reduce_mean(b, b.x, "")
    off = b.node("Sub", [b.x, mean])
    variance = reduce_mean(b, b.node("Mul", [off, off]), "")
    root = b.node("Sqrt", [b.node("Add", [variance, b.const(1e-6)])])
    scale = b.node("Mul", [b.node("Reciprocal", [root]), b.vector(HIDDEN, 1, 0.1)])
    shift = b.node("Sub", [b.vector(HIDDEN, 0, 0.1), b.node("Mul", [mean, scale])])
    y = b.node("Add", [b.node("Mul", [b.x, scale]), shift])
    model = b.model(b.node("Relu", [y]))
    (group,) = norm_parts(model)
    assert len(group) == 12
    assert roles_by_op(model, "Relu") == ["elementwise"]


def test_norm_with_one_pass_variance():
    b = Sketch()
    mean = reduce_mean(b, b.x, "")
    squares = reduce_mean(b, b.node("Mul", [b.x, b.x]), "")
    variance = b.node("Sub", [squares, b.node("Mul", [mean, mean])])
    root = b.node("Sqrt", [b.node("Add", [variance, b.const(1e-6)])])
    y = b.node("Div", [b.node("Sub", [b.x, mean]), root])
    model = b.model(y)
    groups = norm_parts(model)
    assert [ops_of(model, g) for g in groups] == [
        sorted(["ReduceMean", "ReduceMean", "Mul", "Mul", "Sub", "Sub", "Add", "Sqrt", "Div"])
    ]


@pytest.mark.parametrize("recipe", ["R1", "R1-axis1", "R2", "R3a", "R4"])
def test_recipes_of_norms_are_one_norm(recipe):
    model = from_proto(RECIPES[recipe]().model)
    (group,) = norm_parts(model)
    assert len(group) == len(model.layers)


def test_rms_norm_by_power():
    b = Sketch()
    square = b.node("Pow", [b.x, b.const(2.0)])
    mean = b.node("Add", [reduce_mean(b, square, ""), b.const(1e-6)])
    y = b.node("Mul", [b.x, b.node("Pow", [mean, b.const(-0.5)])])
    model = b.model(b.node("Mul", [y, b.const(0.125)]))
    (group,) = norm_parts(model)
    assert ops_of(model, group) == ["Add", "Mul", "Pow", "Pow", "ReduceMean"]


def test_group_norm_with_its_scale_and_shift():
    b = Sketch()
    rows = b.node("Reshape", [b.x, b.ints(2, 4, -1)])
    normal = b.node("InstanceNormalization", [rows, b.const(np.ones(4)), b.const(np.zeros(4))])
    back = b.node("Reshape", [normal, b.ints(2, 6, HIDDEN)])
    scaled = b.node("Mul", [back, b.vector(HIDDEN, 1, 0.1)])
    y = b.node("Add", [scaled, b.vector(HIDDEN, 0, 0.1)])
    model = b.model(b.node("Sigmoid", [y]))
    (group,) = norm_parts(model)
    assert ops_of(model, group) == ["Add", "InstanceNormalization", "Mul", "Reshape"]


def test_standard_deviation_pooling_is_no_norm():
    b = Sketch()
    off = b.node("Sub", [b.x, reduce_mean(b, b.x, "", 1)])
    variance = reduce_mean(b, b.node("Mul", [off, off]), "", 1)
    y = b.node("Concat", [b.node("Sqrt", [variance]), reduce_mean(b, b.x, "", 1)], axis=-1)
    assert norm_parts(b.model(y)) == ()


def test_batch_norm_takes_the_role_of_what_it_folds_into():
    b = Sketch()
    ones = b.const(np.ones(6))
    zeros = b.const(np.zeros(6))
    alone = b.node("BatchNormalization", [b.x, ones, zeros, zeros, ones])
    kernel = b.weight(6, 6, 3)
    behind = b.node("BatchNormalization", [b.node("Conv", [alone, kernel]), ones, zeros, zeros, ones])
    model = b.model(b.node("Relu", [behind]))
    assert roles_by_op(model, "BatchNormalization") == ["norm", "conv"]
    assert len(norm_parts(model)) == 1


def test_softmax_at_the_end_is_the_head_not_attention():
    b = Sketch()
    logits = linear(b, b.x, HIDDEN, 5, "")
    model = b.model(b.node("Softmax", [logits], axis=-1))
    assert attention_blocks(model) == ()
    assert {role.name for role in find_roles(model).values()} == {"head"}


def test_activation_that_adds_its_input_is_no_residual():
    b = Sketch()
    cube = b.node("Mul", [b.node("Pow", [b.x, b.const(3.0)]), b.const(0.044715)])
    y = b.node("Tanh", [b.node("Add", [b.x, cube])])
    assert roles_by_op(b.model(y), "Add") == ["elementwise"]


def test_plain_perceptron_has_hidden_layers_and_a_head():
    b = Sketch()
    hidden = gelu_erf(b, linear(b, b.x, HIDDEN, 16, ""))
    second = b.node("Relu", [linear(b, hidden, 16, 16, "")])
    model = b.model(linear(b, second, 16, 3, ""))
    assert roles_by_op(model, "MatMul") == ["ffn_up", "ffn_up", "head"]


def test_gated_halves_of_one_projection():
    b = Sketch()
    wide = linear(b, b.x, HIDDEN, 128, "", bias=False)
    value, gate = b.nodes("Split", [wide, b.ints(64, 64)], 2, axis=-1)
    product = b.node("Mul", [b.node("Mul", [gate, b.node("Sigmoid", [gate])]), value])
    y = b.node("Add", [linear(b, product, 64, HIDDEN, "", bias=False), b.x])
    model = b.model(y)
    assert roles_by_op(model, "MatMul") == ["ffn_up", "ffn_down"]
    assert roles_by_op(model, "Mul") == ["ffn_act", "ffn_act"]
    assert roles_by_op(model, "Add") == ["residual_add"]


def rotated_neighbours(b, x, width):
    """x cos + stack(-x1, x0) sin, as GPT-J spells it."""
    end = np.iinfo(np.int64).max
    even = b.node("Slice", [x, b.ints(0), b.ints(end), b.ints(-1), b.ints(2)])
    odd = b.node("Slice", [x, b.ints(1), b.ints(end), b.ints(-1), b.ints(2)])
    pairs = [b.node("Unsqueeze", [t, b.ints(-1)]) for t in (b.node("Neg", [odd]), even)]
    turned = b.node("Reshape", [b.node("Concat", pairs, axis=-1), b.ints(0, 0, 0, width)])
    cos, sin = b.const(np.ones((6, width))), b.const(np.zeros((6, width)))
    return b.node("Add", [b.node("Mul", [x, cos]), b.node("Mul", [turned, sin])])


def rotated_pairs(b, x, width):
    """concat(x0 cos - x1 sin, x0 sin + x1 cos)."""
    low, high = b.nodes("Split", [x, b.ints(width // 2, width // 2)], 2, axis=-1)
    cos, sin = b.const(np.ones((6, width // 2))), b.const(np.zeros((6, width // 2)))
    first = b.node("Sub", [b.node("Mul", [low, cos]), b.node("Mul", [high, sin])])
    second = b.node("Add", [b.node("Mul", [low, sin]), b.node("Mul", [high, cos])])
    return b.node("Concat", [first, second], axis=-1)


@pytest.mark.parametrize("rotate", [rotated_neighbours, rotated_pairs])
def test_other_spellings_of_a_rotation(rotate):
    b = Sketch()
    q, k, v = (split_heads(b, linear(b, b.x, HIDDEN, HIDDEN, ""), 4, 8) for _ in range(3))
    q, k = rotate(b, q, 8), rotate(b, k, 8)
    scores = b.node("MatMul", [q, b.node("Transpose", [k], perm=[0, 1, 3, 2])])
    model = b.model(b.node("MatMul", [b.node("Softmax", [scores], axis=-1), v]))
    assert roles_by_op(model, "MatMul") == ["qkv_proj"] * 3 + ["qk_matmul", "pv_matmul"]
    assert set(roles_by_op(model, "Mul")) == {"rope"}
    assert roles_by_op(model, "Add").count("rope") == 2


def test_relative_positions_are_part_of_the_scores():
    b = Sketch()
    q, k, v = (split_heads(b, linear(b, b.x, HIDDEN, HIDDEN, ""), 4, 8) for _ in range(3))
    content = b.node("MatMul", [q, b.node("Transpose", [k], perm=[0, 1, 3, 2])])
    place = b.node("MatMul", [q, b.const(b.rng.normal(size=(1, 4, 8, 6)))])
    scaled = b.node("Mul", [b.node("Add", [content, place]), b.const(0.3)])
    model = b.model(b.node("MatMul", [b.node("Softmax", [scaled], axis=-1), v]))
    assert roles_by_op(model, "MatMul") == ["qkv_proj"] * 3 + ["qk_matmul", "qk_matmul", "pv_matmul"]
    assert len(attention_blocks(model)[0].qk) == 2


def test_cross_attention_projects_the_other_stream():
    d = Dims()
    b = Sketch()
    memory = b.input("memory", TensorProto.FLOAT, [2, 9, HIDDEN])
    h = layer_norm(b, b.x, HIDDEN, "fused")
    q, k, v = (split_heads(b, linear(b, t, HIDDEN, HIDDEN, ""), 4, 8) for t in (h, memory, memory))
    scores = b.node("MatMul", [q, b.node("Transpose", [k], perm=[0, 1, 3, 2])])
    mixed = b.node("MatMul", [b.node("Softmax", [scores], axis=-1), v])
    merged = b.node("Reshape", [b.node("Transpose", [mixed], perm=[0, 2, 1, 3]), b.ints(0, 0, HIDDEN)])
    model = b.model(b.node("Add", [linear(b, merged, HIDDEN, d.hidden, ""), b.x]))
    found = find_roles(model)
    products = [layer for layer in model.layers if layer.op_type == "MatMul"]
    assert [found[layer.id].name for layer in products] == (
        ["qkv_proj"] * 3 + ["qk_matmul", "pv_matmul", "attn_out_proj"]
    )
    assert {found[layer.id].block for layer in products} == {0}


def test_quantized_operands_change_no_role():
    b = Sketch()

    def quantized(x):
        scale, zero = b.const(0.1), b.const(0, np.int8)
        return b.node("DequantizeLinear", [b.node("QuantizeLinear", [x, scale, zero]), scale, zero])

    q, k, v = (
        split_heads(b, b.node("MatMul", [quantized(b.x), quantized(b.weight(HIDDEN, HIDDEN))]), 4, 8)
        for _ in range(3)
    )
    turned = b.node("Transpose", [k], perm=[0, 1, 3, 2])
    scores = b.node("MatMul", [quantized(q), quantized(turned)])
    probabilities = b.node("Softmax", [scores], axis=-1)
    model = b.model(b.node("MatMul", [quantized(probabilities), quantized(v)]))
    assert roles_by_op(model, "MatMul") == ["qkv_proj"] * 3 + ["qk_matmul", "pv_matmul"]


def test_rules_refuse_unknown_keys():
    content = role_rules().model_dump(by_alias=True)
    RoleRules.model_validate(content)
    with pytest.raises(ValidationError, match="tolerance"):
        RoleRules.model_validate({**content, "tolerance": 1})
