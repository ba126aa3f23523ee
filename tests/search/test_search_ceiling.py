"""Ceilings on pins, prices of layers, and frontiers, against brute force and arithmetic by hand."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_tools import workplace

from diag.cli.search_options import ceiling_of
from diag.errors import UsageError
from diag.model.load import load_model
from diag.model.shapes import infer
from diag.pipeline.search.prices import open_prices
from diag.report.io import write_report
from diag.report.schema import Kernel, ModelInfo, PlanInfo, Report, RunInfo
from diag.search.ceiling import affordable, within
from diag.search.frontier import best_by_size, dominated
from diag.search.rank import Candidate, Effect

NAMES = list("abcdef")


def effects(worth: list[float]) -> list[Effect]:
    return [Effect(Candidate(n, frozenset({n})), [w], [w]) for n, w in zip(NAMES, worth, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=6, max_size=6),
    st.lists(st.integers(1, 20), min_size=6, max_size=6),
    st.integers(0, 6),
    st.integers(0, 60),
)
def test_the_set_under_a_ceiling_removes_as_much_as_brute_force_can(
    worth: list[int], cost: list[int], most_pins: int, most_price: int
) -> None:
    prices = {n: float(c) for n, c in zip(NAMES, cost, strict=True)}
    value = dict(zip(NAMES, worth, strict=True))
    subsets = [s for k in range(7) for s in itertools.combinations(NAMES, k)]
    allowed = [s for s in subsets if len(s) <= most_pins and sum(prices[n] for n in s) <= most_price]
    best = max(sum(value[n] for n in s) for s in allowed)
    found = within(effects([float(w) for w in worth]), prices, most_pins, most_price)
    assert all(affordable(s, prices, most_pins, most_price) for s in found)
    assert max(sum(value[n] for n in s) for s in found) == best


def test_the_frontier_takes_what_does_best_on_held_out_data() -> None:
    chosen = {frozenset("a"): 1.0, frozenset("b"): 1.1, frozenset("c"): 5.0, frozenset("ab"): 0.5}
    held = {frozenset("a"): 3.0, frozenset("b"): 2.0, frozenset("c"): 0.1, frozenset("ab"): 0.6}
    # "c" looks so bad on the chosen data that it is not held out; of "a" and "b" the held-out damage decides.
    assert best_by_size(chosen, chosen.__getitem__, held.__getitem__) == [frozenset("b"), frozenset("ab")]


def test_sizes_are_thinned_out_and_both_ends_stay() -> None:
    sets = [frozenset(range(n)) for n in range(30)]
    found = best_by_size(sets, len, len, most_sizes=4)  # type: ignore[arg-type]
    assert [len(s) for s in found] == [0, 10, 19, 29]


def test_domination() -> None:
    assert dominated(1.0, 1.0, [(0.5, 1.0)])
    assert not dominated(1.0, 1.0, [(1.0, 1.0)])
    assert not dominated(1.0, 1.0, [(0.5, 1.1)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    return workplace(tmp_path_factory.mktemp("ceiling"))


def test_no_pins_allowed_is_a_miss_that_is_said(place) -> None:
    found = place.pin("none", ceiling=ceiling_of(0, None))
    assert (found.search.outcome, found.search.pins, found.met) == ("ceiling", [], False)
    assert "under the ceiling" in found.verdict


def test_a_ceiling_that_is_high_enough_changes_nothing(place) -> None:
    found = place.pin("one", ceiling=ceiling_of(1, None))
    assert found.search.pins == [place.planted.culprit]
    assert found.met


def test_a_price_in_ms_needs_measured_prices(place) -> None:
    ceiling = ceiling_of(None, "0.1ms")
    with pytest.raises(UsageError, match="needs measured prices"):
        place.pin("ms", ceiling=ceiling)
    assert not (place.folder / "ms").exists()  # said before anything is measured


@pytest.mark.parametrize("bad", ["10", "ms", "-1ms", "10 percent"])
def test_a_malformed_price_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="is no price"):
        ceiling_of(None, bad)


def one_matmul(path: str, rows: int = 8, inner: int = 16, columns: int = 4) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((inner, columns), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [info("x", onnx.TensorProto.FLOAT, [rows, inner])],
        [info("y", onnx.TensorProto.FLOAT, [rows, columns])],
        [weight],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), path)


def test_an_estimate_is_the_roofline(tmp_path) -> None:
    one_matmul(str(tmp_path / "m.onnx"))
    model = load_model(str(tmp_path / "m.onnx"))
    prices = open_prices((), model, infer(model), "fp32")
    assert not prices.measured
    # Traffic wins here: 8*16 and 16*4 elements in, 8*4 out in FP32; 78 operations in the time of a byte.
    assert prices.layer("mm", "int8") == pytest.approx(78 * ((128 + 64) * 1 + 32 * 4))
    assert prices.layer("mm", "fp16") == pytest.approx(78 * ((128 + 64) * 2 + 32 * 2))
    assert prices.raising(["mm"], {"mm": "int8"}, "fp32") == pytest.approx(78 * (128 + 64) * 3)


def test_large_products_cost_their_operations(tmp_path) -> None:
    one_matmul(str(tmp_path / "m.onnx"), 4096, 4096, 4096)
    model = load_model(str(tmp_path / "m.onnx"))
    prices = open_prices((), model, infer(model), "fp32")
    assert prices.layer("mm", "fp16") == pytest.approx(2 * 4096**3 / 2)
    assert prices.layer("mm", "fp32") == pytest.approx(2 * 4096**3)


def timed(path, sha256: str, default: str, *kernels: tuple[str, list[str], float | None]) -> str:
    report = Report(
        model=ModelInfo(path="m", sha256=sha256, opset=17, node_count=1),
        plan=PlanInfo(default=default, sha256=""),
        run=RunInfo(
            command="", engine="", versions={}, batches=0, samples=0, seconds=0, peak_memory_mb=0, started=""
        ),
        kernels=[Kernel(name=n, layers=layers, time_ms=t) for n, layers, t in kernels],
    )
    write_report(report, path)
    return str(path)


def test_measured_prices_are_the_difference_of_two_engines(tmp_path) -> None:
    one_matmul(str(tmp_path / "m.onnx"))
    model = load_model(str(tmp_path / "m.onnx"))
    low = timed(tmp_path / "low.json", model.sha256, "int8", ("k1", ["mm"], 0.2), ("k2", ["mm"], 0.1))
    high = timed(tmp_path / "high.json", model.sha256, "fp16", ("k", ["mm", "other"], 0.25))
    prices = open_prices((low, high), model, infer(model), "fp32")
    assert prices.measured
    assert prices.raising(["mm"], {"mm": "int8"}, "fp16") == pytest.approx(0.25 - 0.3)


def test_reports_without_times_or_of_another_model_are_refused(tmp_path) -> None:
    one_matmul(str(tmp_path / "m.onnx"))
    model = load_model(str(tmp_path / "m.onnx"))
    with pytest.raises(UsageError, match="no kernel times"):
        open_prices(
            (timed(tmp_path / "a.json", model.sha256, "int8", ("k", ["mm"], None)),), model, {}, "fp32"
        )
    with pytest.raises(UsageError, match="another model"):
        open_prices((timed(tmp_path / "b.json", "0" * 64, "int8", ("k", ["mm"], 1.0)),), model, {}, "fp32")
    with pytest.raises(UsageError, match="names a layer"):
        open_prices(
            (timed(tmp_path / "c.json", model.sha256, "int8", ("k", ["zz"], 1.0)),), model, {}, "fp32"
        )
