"""Causes that act together, in real graphs small enough that brute force over all sets is the truth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.gate.threshold import parse_threshold
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.pipeline.search.setup import Search, set_up
from diag.progress import Silent

WIDTH = 16
Nodes = list[onnx.NodeProto]


class Graph:
    """A graph under construction: x of WIDTH channels, the first a thousand times the others."""

    def __init__(self) -> None:
        self.nodes: Nodes = []
        self.weights: list[onnx.TensorProto] = []
        self.generator = np.random.default_rng(4)

    def node(self, op: str, inputs: Sequence[str], name: str) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name))
        return name

    def weight(self, name: str, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def mixing(self, source: str, name: str, outlier: float = 1.0) -> str:
        """A MatMul that mixes the small channels and passes the large one on, times `outlier`."""
        w = self.generator.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)
        w[0, :] = w[:, 0] = 0.0
        w[0, 0] = outlier
        return self.node("MatMul", [source, self.weight(f"{name}/w", w)], name)

    def model(self, output: str) -> onnx.ModelProto:
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", WIDTH]) for n in ("x", output))
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def masking() -> tuple[Graph, str]:
    """In a chain, either of two layers alone loses everything: raising one brings nothing."""
    g = Graph()
    first = g.mixing("x", "first")
    second = g.mixing(first, "second", outlier=0.0)
    return g, g.mixing(g.mixing(second, "third"), "fourth")


def together() -> tuple[Graph, str]:
    """Two copies of which one is enough: the larger of both. Only when both are lost is anything lost."""
    g = Graph()
    copy = g.node("Neg", [g.node("Neg", ["x"], "negative")], "copy")  # of one input they would be a group
    one, other = g.mixing("x", "one", outlier=0.0), g.mixing(copy, "other", outlier=0.0)
    g.weights[1].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(g.weights[0]), "other/w"))
    alive = g.node("Max", [g.node("Relu", [one], "relu1"), g.node("Relu", [other], "relu2")], "either")
    return g, g.mixing(alive, "last")


def residual() -> tuple[Graph, str]:
    """Both sides of a residual Add fit FP16, the sum does not; a scale brings it back."""
    g = Graph()
    large = g.weight("large", np.where(np.arange(WIDTH) == 0, 40.0, 1.0))
    skip = g.node("Mul", ["x", large], "skip")
    branch = g.node("Mul", [g.mixing("x", "branch"), "large"], "branch_scaled")
    added = g.node("Add", [skip, branch], "residual")
    small = g.weight("small", np.where(np.arange(WIDTH) == 0, 1e-4, 1.0))
    return g, g.mixing(g.node("Mul", [added, small], "scaled"), "out")


CASES = {"masking": (masking, "int8"), "together": (together, "int8"), "residual": (residual, "fp16")}
RIGHT = {
    "masking": ({"first", "second"},),
    "together": ({"one"}, {"other"}),
    "residual": ({"residual", "scaled"},),
}


def settings(name: str, folder: Path) -> SearchSettings:
    build, fmt = CASES[name]
    graph, output = build()
    model = graph.model(output)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    (folder / "data").mkdir()
    for number in range(4):
        x = np.random.default_rng(number).normal(size=(6, WIDTH)).astype(np.float32)
        x[:, 0] = 1000.0
        np.savez(folder / "data" / f"{number}.npz", x=x)
    target = (parse_threshold("sqnr_db>=20"),)
    return SearchSettings(
        str(folder / "model.onnx"), str(folder / "data"), str(folder / "out"), target, format=fmt
    )


def smallest(search: Search) -> set[frozenset[str]]:
    """All smallest sets that meet the target on all batches, by trying every set."""
    every = chain.from_iterable(combinations(sorted(search.ids), n) for n in range(len(search.ids) + 1))
    found: set[frozenset[str]] = set()
    for ids in map(frozenset, every):
        if found and len(ids) > len(next(iter(found))):
            break
        if search.target.met(search.variants.metrics(search.low(ids), range(4))):
            found.add(ids)
    return found


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, SearchSettings, PinResult]:
    asked = settings(request.param, tmp_path)
    return request.param, asked, pin_layers(asked, Silent())


def test_the_planted_set_is_found_and_is_the_smallest(
    case: tuple[str, SearchSettings, PinResult],
) -> None:
    name, asked, result = case
    truth = smallest(set_up(asked, Silent()))
    assert truth == set(map(frozenset, RIGHT[name]))
    assert frozenset(result.search.pins) in truth
    assert result.search.minimal
    assert result.met
