"""Where an engine leaves its emulation, on a chain and on a branch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.feeds import open_feeds
from diag.model.graph import Model
from diag.model.load import load_model
from diag.pipeline.engine.departures import departures, emulated_errors
from diag.pipeline.prepare import calibrate, plan_on
from diag.plan.schema import plan_for_format
from diag.progress import Silent

LAYERS = ("first", "left", "right", "join", "last")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x -> first -> (left | right) -> join -> last."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], "first"),
        helper.make_node("MatMul", ["a", "w1"], ["l"], "left"),
        helper.make_node("MatMul", ["a", "w2"], ["r"], "right"),
        helper.make_node("Add", ["l", "r"], ["j"], "join"),
        helper.make_node("MatMul", ["j", "w3"], ["y"], "last"),
    ]
    weights = [
        numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float32), f"w{n}") for n in range(4)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "branch", ends[:1], ends[1:], weights)
    folder = tmp_path_factory.mktemp("departures")
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "model.onnx")
    np.savez(folder / "0.npz", x=rng.standard_normal((4, 8)).astype(np.float32))
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def model(file: Path) -> Model:
    return load_model(str(file))


EMULATED = {"a": 0.1, "l": 0.1, "r": 0.1, "j": 0.1, "y": 0.1}


@pytest.mark.parametrize(
    ("changes", "hidden", "expected"),
    [
        ({}, (), ()),  # no departure
        ({"a": 0.05}, (), ()),  # better than emulated is none
        ({"l": 0.5, "j": 0.4, "y": 0.4}, (), ("left",)),  # what follows inherits
        ({"l": 0.5, "j": 0.5, "y": 0.9}, (), ("last", "left")),  # the largest first
        ({"l": 0.5, "y": 0.101}, (), ("left",)),  # what rounds to the other side is left out
        ({"j": 0.5, "y": 0.5}, ("l", "r"), ("left", "right", "join")),  # fused: all inside share it
        ({"l": math.inf, "j": math.inf, "y": math.inf}, (), ("left",)),
        ({"l": math.nan, "j": math.nan, "y": math.nan}, (), ("left",)),
    ],
)
def test_departures(
    model: Model, changes: dict[str, float], hidden: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    engine = {n: e for n, e in (EMULATED | changes).items() if n not in hidden}
    assert departures(model, LAYERS, engine, EMULATED) == expected


def test_only_layers_that_were_asked_for(model: Model) -> None:
    engine = EMULATED | {"j": 0.5, "y": 0.5}
    del engine["l"], engine["r"]
    assert departures(model, ("right", "last"), engine, EMULATED) == ("right",)


def test_where_the_emulation_loses_everything_too_nothing_is_blamed(model: Model) -> None:
    lost = dict.fromkeys(EMULATED, math.inf)
    assert departures(model, LAYERS, lost, lost) == ()


def test_errors_of_the_emulation(file: Path, model: Model) -> None:
    """INT8 quantizes both operands of every MatMul: each tensor is wrong by about a hundredth."""
    planned = plan_on(str(file), plan_for_format("int8"))
    feeds = open_feeds(str(file.parent), model.inputs)
    table, _ = calibrate(planned, feeds, None, Silent())
    found = emulated_errors(model, planned.apply(table).model, ["a", "l", "j"], feeds.first())
    assert list(found) == ["a", "l", "j"]
    assert all(1e-3 < error < 0.05 for error in found.values())
