"""Corrections, migration factors and layer errors against their definitions, written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compensation_graphs import HIDDEN, WIDTH, Graph, uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from diag.calibration.table import TensorRange
from diag.compensation.bias import find_corrections
from diag.compensation.draft import Draft, Lowering
from diag.compensation.layer_error import Reference, gain_db
from diag.compensation.smoothing import migration
from diag.compensation.splitting import split_counts
from diag.model.graph import Model
from diag.model.load import load_model


def rounded(values: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    step = np.asarray(step, np.float32)
    return (np.clip(np.rint(values / step), -128, 127) * step).astype(np.float32)


def draft_of(model: Model, tensor: str, limit: float) -> Draft:
    found = TensorRange(absmax=limit, minimum=-limit, maximum=limit, elements=1)
    return Draft(model, {tensor: found}, "minmax")


def test_corrections_are_the_mean_error_over_all_batches(tmp_path: Path) -> None:
    weight = uniform(1, WIDTH, HIDDEN)
    g = Graph()
    g.linear("y", "x", weight)
    model = load_model(g.saved(tmp_path, ["y"]))
    batches = [{"x": uniform(seed, 2, seed + 3, WIDTH) ** 3} for seed in (5, 6, 7)]
    operands = Lowering({"y": "int8"}, "fp32", "int8").operands(model)
    found = find_corrections(draft_of(model, "x", 0.9), operands, "int8", batches, frozenset(["y"]))
    rows = np.concatenate([batch["x"].reshape(-1, WIDTH) for batch in batches]).astype(np.float64)
    weights = rounded(weight, np.abs(weight).max(axis=0) / 127).astype(np.float64)
    expected = (rows @ weight - rounded(rows.astype(np.float32), 0.9 / 127) @ weights).mean(axis=0)
    np.testing.assert_allclose(found["y"], expected, atol=2e-6)
    assert np.abs(expected).max() > 1e-4


def test_corrections_of_convolutions_count_every_pixel(tmp_path: Path) -> None:
    kernel = uniform(1, 4, 3, 3, 3)
    node = helper.make_node("Conv", ["x", "k"], ["y"], name="conv", pads=[1, 1, 1, 1])
    shapes = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, c, 6, 6]) for n, c in (("x", 3), ("y", 4))
    ]
    graph = helper.make_graph([node], "g", shapes[:1], shapes[1:], [numpy_helper.from_array(kernel, "k")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    model = load_model(str(tmp_path / "m.onnx"))
    batches = [{"x": uniform(seed, 2, 3, 6, 6) ** 3} for seed in (5, 6)]
    operands = Lowering({"conv": "int8"}, "fp32", "int8").operands(model)
    found = find_corrections(draft_of(model, "x", 0.9), operands, "int8", batches, frozenset(["conv"]))
    steps = np.abs(kernel).max(axis=(1, 2, 3)) / 127
    coarse = rounded(kernel, steps[:, None, None, None])
    values = np.concatenate([batch["x"] for batch in batches])
    error = convolved(values, kernel) - convolved(rounded(values, 0.9 / 127), coarse)
    np.testing.assert_allclose(found["conv"], error.mean(axis=(0, 2, 3)), atol=1e-6)


def convolved(values: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """3 x 3 with a border of zeros, as a sum over the window."""
    padded = np.pad(values.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = values.shape[2:]
    return sum(
        np.einsum("bihw,oi->bohw", padded[:, :, i : i + height, j : j + width], kernel[:, :, i, j])
        for i in range(3)
        for j in range(3)
    )


def test_migration_follows_the_published_formula() -> None:
    absmax = np.array([1, 4, 16, 64], np.float32)
    weights = [np.diag([1.0, 4.0, 1.0, 1.0]).astype(np.float32)]
    found = migration(absmax, weights, 0.5)
    exact = np.sqrt(absmax) / np.sqrt([1, 4, 1, 1])
    exact /= np.exp2(np.median(np.log2(exact)))
    np.testing.assert_allclose(np.log2(found), np.rint(np.log2(exact)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_factors_are_powers_of_two_and_dead_channels_keep_theirs(seed: int, alpha: float) -> None:
    generator = np.random.default_rng(seed)
    absmax = np.exp2(generator.uniform(-8, 8, 12)).astype(np.float32)
    weight = generator.normal(size=(12, 5)).astype(np.float32)
    absmax[generator.integers(12)] = 0
    weight[generator.integers(12)] = 0
    found = migration(absmax, [weight], alpha)
    assert np.all(np.log2(found) == np.rint(np.log2(found)))
    dead = (absmax == 0) | (np.abs(weight).max(axis=1) == 0)
    assert np.all(found[dead] == 1)


def test_tied_channels_get_one_factor() -> None:
    ties = np.array([0, 1, 0, 1])
    found = migration(np.array([1, 1, 256, 1], np.float32), [np.ones((4, 2), np.float32)], 0.5, ties)
    assert found[0] == found[2] > found[1] == found[3]


def test_noise_of_a_layer_weighs_vectors_and_energy() -> None:
    rows, weight = np.eye(2, dtype=np.float32), np.diag([10.0, 1.0]).astype(np.float32)
    reference = Reference(rows, [weight])
    wrong = np.array([[11, 0], [0, 1.5]], np.float32)
    vectors, energy = (0.01 + 0.25) / 2, (1 + 0.25) / 101
    assert reference.noise_of(0, wrong) == pytest.approx(np.sqrt(vectors * energy))
    assert reference.noise_of(0, rows @ weight) == 0
    assert gain_db(0.1, 0.01) == pytest.approx(10)


@pytest.mark.parametrize(
    ("channels", "counts"),
    [(384, (16, 32)), (64, ()), (1536, (16, 32, 64)), (24, ()), (65, (1, 2, 4)), (0, ())],
)
def test_splits_keep_the_alignment_of_the_width(channels: int, counts: tuple[int, ...]) -> None:
    assert split_counts(channels, 0.1) == counts
