"""Self-checks on ONNX Runtime as a healthy engine and on runners with planted faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from diag.compare.selfcheck import TESTS, SelfCheck, contradictions, self_checks
from diag.engines.runner import OnnxRuntimeRunner
from diag.model.graph import Model

Array = NDArray[Any]
Feed = Mapping[str, Array]
Run = Callable[[Feed], Mapping[str, Array]]

RNG = np.random.default_rng(3)
FEED = {"x": RNG.standard_normal((6, 16)).astype(np.float32), "gain": np.array([2.0], np.float32)}
WEIGHT = RNG.standard_normal((16, 8)).astype(np.float32)
SIZES = (1, 3, 6, 12)


def healthy() -> OnnxRuntimeRunner:
    """Two MatMuls with a Relu between; `gain` has no rows of the batch."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Mul", ["b", "gain"], ["y"], "scale"),
        helper.make_node("ReduceSum", ["y"], ["total"], "sum", keepdims=0),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16]),
        helper.make_tensor_value_info("gain", TensorProto.FLOAT, [1]),
    ]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "total")]
    weight = numpy_helper.from_array(WEIGHT, "w")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return OnnxRuntimeRunner(Model("small", proto, {}, ""))


def faulty(break_rows: Callable[[Array], Array]) -> Run:
    runner = healthy()

    def run(feed: Feed) -> Mapping[str, Array]:
        outputs = runner.run(feed)
        return {"y": break_rows(outputs["y"]), "total": outputs["total"]}

    return run


def checks(run: Run, **options: Any) -> dict[str, SelfCheck]:
    found = self_checks(run, FEED, tolerance_rel_l2=1e-5, sizes=SIZES, **options)
    return {check.test: check for check in found if check.output == "y"}


def test_a_healthy_engine_is_silent() -> None:
    found = self_checks(healthy().run, FEED, tolerance_rel_l2=1e-5, reference=healthy().run, sizes=SIZES)
    assert contradictions(found) == []
    assert {c.test for c in found if c.output == "y" and c.status == "agrees"} == set(TESTS)


def test_an_output_without_rows_is_left_out_of_the_tests_on_rows() -> None:
    found = self_checks(healthy().run, FEED, tolerance_rel_l2=1e-5, sizes=SIZES)
    totals = {check.test: check.status for check in found if check.output == "total"}
    assert totals == {test: "agrees" if test == "same_call" else "not_run" for test in TESTS}


def roll_row_by_its_number(y: Array) -> Array:
    return np.stack([np.roll(row, b) for b, row in enumerate(y)])


FAULTS: dict[str, tuple[Callable[[Array], Array], set[str]]] = {
    "row b rolled by b": (
        roll_row_by_its_number,
        {"identical_rows", "permuted_rows", "one_by_one"},
    ),
    "rows after the first ignored": (
        lambda y: np.concatenate([y[:1], np.zeros_like(y[1:])]),
        {"identical_rows", "permuted_rows", "one_by_one"},
    ),
    "row 0 for all": (
        lambda y: np.repeat(y[:1], len(y), axis=0),
        {"permuted_rows", "one_by_one"},
    ),
    "wrong except at the optimum size": (
        lambda y: y if len(y) == 6 else y * np.float32(1.5),
        {"one_by_one", "other_sizes"},
    ),
    "not finite in the last row": (
        lambda y: np.concatenate([y[:-1], np.full_like(y[-1:], np.nan)]),
        {"identical_rows", "permuted_rows"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_contradictions(name: str) -> None:
    break_rows, least = FAULTS[name]
    found = checks(faulty(break_rows), reference=healthy().run)
    contradicting = {test for test, check in found.items() if check.status == "contradiction"}
    assert least <= contradicting
    assert found["same_call"].status == "agrees"
    assert all(found[test].rel_l2 > 0.1 for test in least)


def test_a_contradiction_names_the_row_and_its_size() -> None:
    found = checks(faulty(lambda y: np.concatenate([y[:4], y[4:5] + np.float32(1), y[5:]])))
    worst = found["identical_rows"]
    assert worst.row == 4
    assert worst.max_abs == pytest.approx(1.0, rel=1e-6)
    assert "row 4" in worst.text


def test_noise_between_calls_is_measured_as_such() -> None:
    noise = np.random.default_rng(0)
    found = checks(faulty(lambda y: y + noise.standard_normal(y.shape).astype(np.float32)))
    assert found["same_call"].status == "contradiction"


def test_rounding_within_the_tolerance_is_silent() -> None:
    noise = np.random.default_rng(0)
    run = faulty(lambda y: y * (1 + np.float32(1e-6) * noise.standard_normal(y.shape).astype(np.float32)))
    assert {check.status for check in checks(run).values()} == {"agrees"}


def test_a_model_that_mixes_rows_is_no_fault_of_the_engine() -> None:
    mixing = faulty(lambda y: y - y.mean(axis=0))
    found = checks(mixing, reference=mixing)
    assert found["one_by_one"].status == "model"
    assert "the model mixes rows" in found["one_by_one"].text
    assert checks(mixing, reference=healthy().run)["one_by_one"].status == "contradiction"


@pytest.mark.parametrize(
    ("feed", "sizes", "reasons"),
    [
        ({"x": FEED["x"][:1], "gain": FEED["gain"]}, (1,), {"identical_rows": "one row"}),
        (FEED, (6,), {"one_by_one": "no batch of one row", "other_sizes": "no other batch size"}),
        (FEED, (1, 6), {"other_sizes": "no other batch size of several rows"}),
    ],
)
def test_what_cannot_be_tested_is_said(feed: Feed, sizes: tuple[int, ...], reasons: dict[str, str]) -> None:
    found = self_checks(healthy().run, feed, tolerance_rel_l2=1e-5, sizes=sizes)
    for test, reason in reasons.items():
        check = next(c for c in found if c.test == test and c.output == "y")
        assert check.status == "not_run"
        assert reason in check.text


def test_inputs_that_share_no_leading_dimension() -> None:
    feed = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4, 3), np.float32)}
    found = self_checks(lambda fed: {"y": fed["a"]}, feed, tolerance_rel_l2=0.0)
    assert {c.status for c in found if c.test != "same_call"} == {"not_run"}
