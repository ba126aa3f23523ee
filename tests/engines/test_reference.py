"""When a reference can be trusted: it must not move under a change that must not matter."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from engine_tools import BOOL, FLOAT, INT64, Array, graph, node, normal
from onnx import helper

from diag.engines.onnxruntime import Session
from diag.engines.reference import Trust, _jittered, examine
from diag.errors import EngineError
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto
from fixtures.graphs import Dims, bert, cnn, conformer, detector, gpt2, llama, vit

SMALL = Dims(hidden=16, heads=2, kv_heads=1, ffn=24, blocks=1, vocab=31, seq_len=5)
TOLERANCE = 1e-3
ULP = 2.0**-23


def examined(model: Model, feeds: dict[str, Array], seed: int = 0) -> Trust:
    return examine(model, feeds, shapes.infer(model), seed)


def worst(trust: Trust) -> float:
    return max(trust.optimisation_rel_l2, trust.jitter_rel_l2)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(make, SMALL) for make in (bert, gpt2, llama, vit, conformer)),
        partial(cnn, channels=4, blocks=1, image=8),
        partial(detector, channels=4, image=16),
        partial(bert, SMALL, norm="fused"),
    ],
)
def test_sound_models_are_trusted(make) -> None:
    fixture = make()
    model = from_proto(fixture.model)
    trust = examined(model, dict(fixture.batch(2)))
    assert 0 < trust.jitter_rel_l2 < 1e-5
    assert trust.optimisation_rel_l2 < 1e-5
    assert set(trust.noise) == set(model.outputs)
    assert all(noise > 0 for noise in trust.noise.values())


def cancelling(size: float) -> Model:
    """(x + size) - size: every bit of x below size * 2^-24 is noise."""
    nodes = [node("Add", "x big", "a", "up"), node("Sub", "a big", "y", "down")]
    return graph(nodes, {"x": (FLOAT, ["n"])}, "y", {"big": np.float32(size)})


def logistic(steps: int) -> Model:
    """x <- 4 x (1 - x): the textbook's chaos; an error doubles with every step."""
    nodes = []
    name = "x"
    for step in range(steps):
        nodes += [
            node("Sub", f"one {name}", f"r{step}", f"rest{step}"),
            node("Mul", f"{name} r{step}", f"p{step}", f"product{step}"),
            node("Mul", f"p{step} four", f"x{step}", f"next{step}"),
        ]
        name = f"x{step}"
    nodes.append(node("Identity", name, "y", "last"))
    return graph(nodes, {"x": (FLOAT, ["n"])}, "y", {"one": np.float32(1), "four": np.float32(4)})


def near_zero_divisor() -> Model:
    """1 / (x - x (1 + 1e-6) + tiny): a divisor that is all rounding."""
    nodes = [
        node("Mul", "x near", "z", "scale"),
        node("Sub", "x z", "d", "difference"),
        node("Reciprocal", "d", "y", "inverse"),
    ]
    return graph(nodes, {"x": (FLOAT, ["n"])}, "y", {"near": np.float32(1 + 1e-6)})


@pytest.mark.parametrize(
    ("model", "trusted"),
    [
        (cancelling(1.0), True),
        (cancelling(1e6), False),
        (logistic(5), True),
        (logistic(40), False),
        (near_zero_divisor(), False),
    ],
)
def test_chaos_is_told_from_order(model: Model, trusted: bool) -> None:
    x = np.random.default_rng(0).uniform(0.1, 0.9, 64).astype(np.float32)
    trust = examined(model, {"x": x})
    assert (worst(trust) <= TOLERANCE) == trusted


def test_noise_is_the_largest_movement_of_each_output() -> None:
    nodes = [
        node("Add", "x big", "a", "up"),
        node("Sub", "a big", "y", "down"),
        node("Mul", "x third", "z", "calm"),
        node("ArgMax", "x", "i", "argmax", axis=0, keepdims=0),
        node("Cast", "i", "w", "float", to=FLOAT),
    ]
    model = graph(nodes, {"x": (FLOAT, ["n"])}, "y z w", {"big": np.float32(1e6), "third": np.float32(1 / 3)})
    x = np.linspace(0.5, 1, 100, dtype=np.float32)
    noise = examined(model, {"x": x}).noise
    assert 1e6 * ULP / 2 <= noise["y"] <= 4e6 * ULP
    assert ULP / 4 <= noise["z"] <= 2 * ULP
    assert noise["w"] == 0  # an integer is exact, and so is its Cast


def jittered(model: Model, feeds: dict[str, Array], seed: int = 0) -> dict[str, Array]:
    return Session(_jittered(model, shapes.infer(model), seed), model.weights).run(feeds)


def test_jitter_moves_every_float_tensor_by_one_rounding() -> None:
    nodes = [
        node("Mul", "x one", "a", "first"),
        node("Mul", "a one", "b", "second"),
        node("Mul", "b one", "c", "third"),
        node("Reshape", "c flat", "y", "exact"),  # rounds nothing, and is not moved
    ]
    model = graph(nodes, {"x": (FLOAT, ["n", 64])}, "y", {"one": np.float32(1), "flat": np.array([-1, 64])})
    x = np.ones((3, 64), np.float32)
    moved = jittered(model, {"x": x})["y"].astype(np.float64) - 1
    assert set(np.round(moved[0] / ULP * 2) / 2) <= {k / 2 for k in range(-6, 7)}
    assert np.abs(moved).max() >= 2.5 * ULP  # three factors of the same sign somewhere among 64
    assert (moved > 0).any()
    assert (moved < 0).any()
    assert np.array_equal(moved[0], moved[2])


def test_jitter_follows_its_seed() -> None:
    model = graph([node("Neg", "x", "y", "op"), node("Sqrt", "x", "z", "root")], {"x": (FLOAT, [64])}, "z")
    x = np.ones(64, np.float32)
    first, again, other = (jittered(model, {"x": x}, seed)["z"] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_jitter_leaves_shapes_integers_and_constants_alone() -> None:
    nodes = [
        node("Shape", "x", "s", "shape"),
        node("ConstantOfShape", "s", "zeros", "fill"),
        node("Exp", "zeros", "ones", "exp"),
        node("Reshape", "x flat", "r", "reshape"),
        node("Cast", "r", "i", "to_int", to=INT64),
        node("Cast", "i", "y", "to_float", to=FLOAT),
        node("Identity", "ones", "z", "same"),
    ]
    model = graph(nodes, {"x": (FLOAT, ["n", 2])}, "y z i", {"flat": np.array([-1])})
    model.proto.graph.output[2].type.tensor_type.elem_type = INT64
    x = np.float32([[1.5, 2.5], [3.5, 4.5]])
    got = jittered(model, {"x": x})
    assert got["i"].tolist() == [1, 2, 3, 4]
    assert got["z"].tolist() == [[1, 1], [1, 1]]
    assert got["y"].shape == (4,)


def test_scalars_unknown_ranks_and_branches() -> None:
    value = helper.make_tensor_value_info
    then = helper.make_graph([node("Exp", "a", "t", "in_exp")], "then", [], [value("t", FLOAT, None)])
    other = helper.make_graph([node("Neg", "a", "u", "in_neg")], "other", [], [value("u", FLOAT, None)])
    nodes = [
        node("Mul", "x x", "a", "mul"),
        node("If", "flag", "b", "branch", then_branch=then, else_branch=other),
        node("ReduceMax", "b", "m", "max", keepdims=0),
        node("Div", "b m", "y", "div"),
    ]
    model = graph(nodes, {"x": (FLOAT, ["n", "k"]), "flag": (BOOL, [])}, "y m")
    trust = examined(model, {"x": normal(3, 4), "flag": np.array(True)})
    assert 0 < trust.jitter_rel_l2 < 1e-5


def test_shape_values_are_those_of_the_batch() -> None:
    nodes = [
        node("Shape", "x", "s", "shape"),
        node("Gather", "s first", "n", "take"),
        node("Unsqueeze", "n axes", "u", "unsqueeze"),
        node("Concat", "u rest", "target", "cat", axis=0),
        node("Reshape", "x target", "y", "reshape"),
    ]
    constants = {"first": np.array(0), "axes": np.array([0]), "rest": np.array([2, -1])}
    model = graph(nodes, {"x": (FLOAT, ["n", 6])}, "y", constants)
    values = examined(model, {"x": normal(5, 6)}).shape_values
    assert {name: v.tolist() for name, v in values.items()} == {
        "s": [5, 6],
        "n": 5,
        "u": [5],
        "target": [5, 2, -1],
    }


@pytest.mark.parametrize("value", [-3.4028235e38, -1e30, -np.inf])
def test_masks_are_not_moved(value: float) -> None:
    """A row masked whole: softmax of equal values, however large, is uniform; moved, it would be one-hot."""
    nodes = [node("Add", "x mask", "a", "add"), node("Softmax", "a", "y", "softmax", axis=-1)]
    model = graph(nodes, {"x": (FLOAT, [2, 8]), "mask": (FLOAT, [2, 8])})
    mask = np.zeros((2, 8), np.float32)
    mask[1] = value
    assert worst(examined(model, {"x": normal(2, 8), "mask": mask})) < 1e-5


def test_large_weights_are_examined_too() -> None:
    model = graph([node("MatMul", "x w", "y", "op")], {"x": (FLOAT, ["n", 64])}, "y", {"w": normal(64, 64)})
    assert model.weights
    assert 0 < examined(model, {"x": normal(3, 64)}).jitter_rel_l2 < 1e-6


def test_a_reference_that_is_not_finite_is_no_reason_to_fail() -> None:
    model = graph([node("Log", "x", "y", "log")], {"x": (FLOAT, ["n"])})
    trust = examined(model, {"x": np.float32([0, -1, 1, 2])})
    assert worst(trust) < 1e-5  # over what is finite; the rest is reported as such elsewhere


def test_an_unknown_operator_is_named() -> None:
    nodes = [
        node("Relu", "x", "a", "relu"),
        helper.make_node("Nonsense", ["a"], ["y"], "odd", domain="my.ops"),
    ]
    proto = graph(nodes, {"x": (FLOAT, ["n"])}).proto
    proto.opset_import.append(helper.make_opsetid("my.ops", 1))
    model = from_proto(proto)
    with pytest.raises(EngineError, match="Nonsense"):
        examined(model, {"x": normal(3)})
