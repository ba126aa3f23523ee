"""Which layers a plan may lower: floats that depend on the inputs, and no shape or index arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from plan_graphs import (
    ATTENTION_FLOAT,
    ATTENTION_MATMUL,
    ATTENTION_WEIGHTED,
    FLOAT,
    INT64,
    attention,
    model,
    node,
    weight,
)

from diag.model.graph import LINEAR_OPS, TensorInfo
from diag.plan.layers import float_layers


def test_shape_arithmetic_is_never_lowered() -> None:
    found = float_layers(attention())
    assert set(found.ids) == set(ATTENTION_FLOAT)
    assert found.operand == set(ATTENTION_MATMUL)
    assert found.weighted == set(ATTENTION_WEIGHTED)
    assert found.fed == set(ATTENTION_FLOAT)


def test_what_is_folded_from_constants_is_not_lowered() -> None:
    nodes = [
        node("Constant", "", "c", "const", value_float=2.0),
        node("Mul", "w c", "scaled", "fold"),
        node("Transpose", "scaled", "wt", "turn", perm=[1, 0]),
        node("MatMul", "x wt", "y", "fc"),
    ]
    found = float_layers(model(nodes, {"x": (FLOAT, [1, 2])}, ["y"], {"w": weight(3, 2)}))
    assert found.ids == ("fc",)
    assert found.weighted == {"fc"}


def test_index_arithmetic_in_floats_is_not_lowered() -> None:
    """Positions are counted in floats, rounded, and used as indices; the mask is read by others too."""
    nodes = [
        node("Cast", "mask", "maskf", "to_float", to=FLOAT),
        node("Mul", "maskf half", "scaled", "scale"),
        node("Floor", "scaled", "floored", "floor"),
        node("Cast", "floored", "pos", "to_int", to=INT64),
        node("Add", "pos one", "pos1", "shift"),
        node("Gather", "table pos1", "emb", "lookup"),
        node("Mul", "emb maskf", "y", "masked"),
    ]
    constants = {"half": np.float32(0.5), "one": np.array(1, np.int64), "table": weight(9, 4)}
    found = float_layers(model(nodes, {"mask": (INT64, [4, 1])}, ["y"], constants))
    assert found.ids == ("to_float", "lookup", "masked")
    assert found.fed == {"lookup", "masked"}


def test_a_decision_about_values_ends_the_walk() -> None:
    """A token chosen by ArgMax is an index, but the network that chose it is no index arithmetic."""
    nodes = [
        node("MatMul", "x w", "logits", "head"),
        node("ArgMax", "logits", "token", "choose", axis=-1, keepdims=0),
        node("Gather", "table token", "y", "lookup"),
    ]
    found = float_layers(
        model(nodes, {"x": (FLOAT, [1, 2])}, ["y"], {"w": weight(2, 5), "table": weight(5, 3)})
    )
    assert found.ids == ("head", "choose", "lookup")


def test_an_index_that_is_also_an_output_or_data_is_lowered() -> None:
    nodes = [
        node("Mul", "x half", "scaled", "scale"),
        node("Cast", "scaled", "pos", "to_int", to=INT64),
        node("Gather", "scaled pos", "y", "lookup"),
    ]
    found = float_layers(model(nodes, {"x": (FLOAT, [4])}, ["y"], {"half": np.float32(0.5)}))
    assert found.ids == ("scale", "lookup")
    # A count that depends on values and is also shown to the user is data.
    nodes = [
        node("Mul", "x half", "scaled", "scale"),
        node("Cast", "scaled", "n", "to_int", to=INT64),
        node("Tile", "x n", "y", "tile"),
    ]
    shown = model(nodes, {"x": (FLOAT, [1])}, ["y", "scaled"], {"half": np.float32(0.5)})
    assert float_layers(shown).ids == ("scale", "tile")


def test_scales_of_a_resize_are_no_data_unless_they_are_read_as_such() -> None:
    nodes = [node("Mul", "x half", "s", "scale"), node("Resize", "x none s", "y", "resize", mode="nearest")]
    constants = {"half": np.float32(0.5), "none": np.zeros(0, np.float32)}
    assert float_layers(model(nodes, {"x": (FLOAT, [1])}, ["y"], constants)).ids == ("resize",)
    nodes[1] = node("Resize", "s none s", "y", "resize", mode="nearest")
    assert float_layers(model(nodes, {"x": (FLOAT, [1])}, ["y"], constants)).ids == ("scale", "resize")


def test_a_foreign_operator_of_a_known_name_is_not_quantized_by_default() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="custom", domain="my.ops")]
    found = float_layers(model(nodes, {"x": (FLOAT, [2, 2])}, ["y"], {"w": weight(2, 2)}))
    assert (found.ids, found.operand) == (("custom",), frozenset())


def test_subgraphs_and_the_models_own_quantizers_keep_their_types() -> None:
    branch = helper.make_graph(
        [node("Neg", "q", "b", "inner")], "b", [], [helper.make_tensor_value_info("b", FLOAT, None)]
    )
    nodes = [
        node("QuantizeLinear", "x s z", "i", "quantize"),
        node("DequantizeLinear", "i s z", "q", "dequantize"),
        node("If", "flag", "chosen", "branch", then_branch=branch, else_branch=branch),
        node("Relu", "chosen", "y", "relu"),
    ]
    inputs = {"x": (FLOAT, [2]), "flag": (TensorProto.BOOL, [1])}
    constants = {"s": np.float32(0.1), "z": np.int8(0)}
    assert float_layers(model(nodes, inputs, ["y"], constants)).ids == ("relu",)


def test_where_inference_is_silent_float_in_means_float_out() -> None:
    nodes = [
        helper.make_node("Mystery", ["x"], ["m"], name="custom", domain="my.ops"),
        node("Relu", "m", "y", "relu"),
        node("MatMul", "ids more", "k", "integers"),
    ]
    graph = model(nodes, {"x": (FLOAT, [2]), "ids": (INT64, [1, 1]), "more": (INT64, [1, 1])}, ["y"])
    known = {"x": TensorInfo(FLOAT, None), "ids": TensorInfo(INT64, None), "k": TensorInfo(INT64, None)}
    found = float_layers(graph, known)
    assert found.ids == ("custom", "relu")
    assert found.operand == frozenset()


@pytest.mark.parametrize("op", sorted(LINEAR_OPS))
def test_each_operator_whose_operands_are_quantized(op: str) -> None:
    shape = [1, 2, 5, 5] if op.startswith("Conv") else [2, 2]
    w = weight(2, 2, 3, 3) if op.startswith("Conv") else weight(2, 2)
    found = float_layers(model([node(op, "x w", "y", "it")], {"x": (FLOAT, shape)}, ["y"], {"w": w}))
    assert (found.operand, found.weighted) == ({"it"}, {"it"})
