"""The screen before a search in FP16: what passes the range on one batch only is not left out."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.engines.reference import examine
from diag.gate.threshold import parse_threshold
from diag.pipeline.prepare import choose_plan, plan_on
from diag.pipeline.search import screen, setup
from diag.pipeline.search.cheap import cheap_scores
from diag.pipeline.search.job import pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.progress import Silent
from diag.search.pins import candidates_of
from diag.search.target import Target

FLOAT = TensorProto.FLOAT


@pytest.fixture
def planned(tmp_path):
    """Only /square can pass FP16's 65504, and with it /product, which reads it."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], "/square"),
        helper.make_node("Mul", ["x", "small"], ["less"], "/less"),
        helper.make_node("Mul", ["square", "less"], ["product"], "/product"),
        helper.make_node("Tanh", ["product"], ["y"], "/tanh"),
    ]
    graph = helper.make_graph(
        nodes,
        "squares",
        [helper.make_tensor_value_info("x", FLOAT, ("n", 4))],
        [helper.make_tensor_value_info("y", FLOAT, ("n", 4))],
        [numpy_helper.from_array(np.full(4, 1e-6, np.float32), "small")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    return plan_on(str(tmp_path / "m.onnx"), choose_plan(None, "fp16"))


def kept(planned, batches, monkeypatch, beside=0):
    monkeypatch.setattr(screen, "_KEPT", beside)
    typed = planned.apply(None)
    candidates = candidates_of([n for n, fmt in typed.formats.items() if fmt == "fp16"], [])
    trust = examine(planned.model, batches[0], planned.types)
    found = screened(planned, typed.model, candidates, batches, trust, Silent())
    return [candidate.id for candidate in found]


def screened(planned, lowered, candidates, batches, trust, progress):
    looked_at, target = screen.looked_at(batches), Target([parse_threshold("sqnr_db>=30")])
    scores = cheap_scores(planned, lowered, candidates, looked_at, trust, target, None, progress)
    return screen.screened(candidates, scores, progress)


def batch(largest):
    return {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4) * np.float32(largest)}


def test_overflow_on_any_batch_counts(planned, monkeypatch):
    assert kept(planned, [batch(250)], monkeypatch) == []  # 250^2 = 62,500
    for order in ([250, 300], [300, 250], [1, 250, 300, 2]):
        assert kept(planned, [batch(size) for size in order], monkeypatch) == ["/square", "/product"]


def test_of_many_batches_some_are_looked_at(planned, monkeypatch):
    seen = []

    class Counting(Silent):
        def start(self, stage, total):
            seen.append(total)

    typed, sizes = planned.apply(None), [1] * 20
    trust = examine(planned.model, batch(1), planned.types)
    candidates = candidates_of(["/square", "/less", "/product", "/tanh"], [])
    screened(planned, typed.model, candidates, [batch(s) for s in sizes], trust, Counting())
    assert seen[0] is not None
    assert 4 <= seen[0] <= 8


def test_the_largest_errors_are_kept_beside(planned, monkeypatch):
    found = kept(planned, [batch(1), batch(300)], monkeypatch, beside=1)
    assert len(found) == 3
    assert {"/square", "/product"} < set(found)


@pytest.mark.parametrize("screens", [True, False])
def test_what_overflows_without_harm_stays_lowered_and_is_said(tmp_path, monkeypatch, screens):
    """300^2 overflows twice: /loud reaches the output, /capped only through a minimum with 1."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["loud"], "/loud"),
        helper.make_node("Mul", ["loud", "small"], ["scaled"], "/scaled"),
        helper.make_node("Mul", ["x", "x"], ["capped"], "/capped"),
        helper.make_node("Min", ["capped", "one"], ["below"], "/below"),
        helper.make_node("Add", ["scaled", "below"], ["y"], "/sum"),
    ]
    values = {"small": np.full(4, 1e-5, np.float32), "one": np.ones(4, np.float32)}
    graph = helper.make_graph(
        nodes,
        "harmless",
        [helper.make_tensor_value_info("x", FLOAT, ("n", 4))],
        [helper.make_tensor_value_info("y", FLOAT, ("n", 4))],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for number in range(4):
        sizes = np.random.default_rng(number).uniform(280, 320, (3, 4)).astype(np.float32)
        np.savez(tmp_path / "data" / f"{number}.npz", x=sizes)
    if screens:
        monkeypatch.setattr(setup, "MOST_CANDIDATES", 1)
    paths = [str(tmp_path / name) for name in ("m.onnx", "data", "out")]
    result = pin_layers(SearchSettings(*paths, (parse_threshold("sqnr_db>=20"),), format="fp16"), Silent())
    assert set(result.search.pins) == {"/loud", "/scaled"}
    # Only a screen has looked at every layer by itself.
    assert (
        "target does not ask for them: 1 (norms among them: 0), the first /capped." in result.proof
    ) is screens
