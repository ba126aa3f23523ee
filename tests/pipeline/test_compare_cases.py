"""Models and data out of the ordinary: changing lengths, integers only, a broken reference, odd names."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from stepwise import Stepwise, metrics

from diag.errors import UsageError
from diag.gate.threshold import parse_threshold
from diag.report.io import dumps, loads, read_report
from fixtures.graphs import bert, gpt2, llama
from fixtures.graphs.faults import swiglu_overflow

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
RNG = np.random.default_rng(5)


def copied(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def small(nodes, outputs, weights=(), shape=("n", 8), **ranks):
    """A model of a few nodes that reads `x`; as much of a fixture as a comparison needs."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, shape)]
    made = [
        helper.make_tensor_value_info(name, kind, ranks.get(name, (None, None)))
        for name, kind in outputs.items()
    ]
    stored = [
        numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in dict(weights).items()
    ]
    graph = helper.make_graph(nodes, "small", inputs, made, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    return SimpleNamespace(name="small", model=model)


def node(op, reads, writes, **attributes):
    writes = writes.split()
    return helper.make_node(op, reads.split(), writes, name=f"/{writes[0]}", **attributes)


def normal(*shape):
    return RNG.normal(0, 1, shape).astype(np.float32)


@pytest.mark.parametrize("fmt", ["int8", "fp16"])
def test_every_batch_has_its_own_size(compared, fmt):
    """Lengths and batch sizes change from batch to batch; sums are over all elements."""
    fixture = bert()
    batches = []
    for number, (rows, length) in enumerate([(2, 12), (3, 5), (1, 9), (4, 1)]):
        full = fixture.batch(rows, number)
        batches.append({name: array[:, :length] for name, array in full.items()})
    report = compared(fixture, fmt, batches)
    by_hand = Stepwise(fixture.model, fmt, batches)
    want = metrics(
        [v["last_hidden_state"] for v in by_hand.reference],
        [v["last_hidden_state"] for v in by_hand.accumulated],
    )
    got = report.outputs[0].metrics
    assert got["sqnr_db"] == pytest.approx(want["sqnr_db"], abs=0.02)
    assert got["elements"] == want["elements"] == (24 + 15 + 9 + 4) * 32
    assert (report.run.batches, report.run.samples) == (4, 10)


def with_argmax(fixture):
    """The fixture with tokens as its only output."""
    model = copied(fixture.model)
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["tokens"], "/tokens", axis=-1))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("tokens", INT64, None))
    return replace(fixture, model=model)


def test_integers_as_the_only_output(compared, tmp_path):
    report = compared(with_argmax(gpt2()), "fp16", 2)
    assert report.outputs == []
    assert "No float output" in report.verdict
    assert sum(1 for layer in report.layers if layer.accumulated) > 80
    assert loads(dumps(report), "report") == report
    assert (tmp_path / "out" / "report.html").is_file()


def test_damage_behind_integers_still_counts(compared):
    planted = swiglu_overflow(llama())
    report = compared(with_argmax(planted.fixture), "fp16", 2)
    assert [birth.layer for birth in report.births if birth.reaches_output] == [planted.culprit]
    assert report.findings[0].severity == "error"
    assert report.findings[0].mend.pins


def test_a_gate_on_integers_only_does_not_pass(compared):
    checks = (parse_threshold("sqnr_db>=1"),)
    report = compared(with_argmax(gpt2()), "fp16", 1, fail_under=checks)
    assert report.gate is not None
    assert not report.gate.passed
    named = (parse_threshold("tokens:sqnr_db>=1"),)
    with pytest.raises(UsageError, match="tokens"):
        compared(with_argmax(gpt2()), "fp16", 1, fail_under=named)


@pytest.fixture
def two_outputs():
    """One output that INT8 hardly touches, one that it ruins: a column is 40 times the others."""
    weights = {"good": np.eye(8), "scale": np.r_[40.0, np.ones(7)], "bad": np.diag(np.r_[0.0, np.ones(7)])}
    nodes = [
        node("MatMul", "x good", "first"),
        node("Mul", "x scale", "scaled"),
        node("MatMul", "scaled bad", "second"),
    ]
    return small(nodes, {"first": FLOAT, "second": FLOAT}, weights)


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        ("first:sqnr_db>=30", True),
        ("second:sqnr_db>=30", False),
        ("sqnr_db>=30", False),
        ("sqnr_db>=0.5", True),
    ],
)
def test_several_outputs_and_a_gate(compared, two_outputs, check, passed):
    batches = [{"x": np.abs(normal(16, 8)) + 1} for _ in range(2)]
    report = compared(two_outputs, "int8", batches, fail_under=(parse_threshold(check),))
    assert [output.name for output in report.outputs] == ["first", "second"]
    first, second = (output.metrics["sqnr_db"] for output in report.outputs)
    assert first > 35
    assert 0.5 < second < 20
    assert report.gate.passed is passed
    assert "second" in report.verdict
    assert [birth.layer for birth in report.births] == ["/second"]


def test_a_reference_that_is_not_finite(compared, tmp_path):
    """log of a negative number: a finding, and the rest is compared where it is finite."""
    nodes = [node("Log", "x", "logged"), node("MatMul", "x w", "other"), node("Exp", "logged", "y")]
    fixture = small(nodes, {"y": FLOAT, "other": FLOAT}, {"w": normal(8, 8)})
    values = np.abs(normal(4, 8)) + 0.5
    values[1, 2] = -1
    report = compared(fixture, "fp16", [{"x": values}])
    first = report.findings[0]
    assert (first.kind, first.severity) == ("reference-trust", "error")
    assert report.run.reference.nonfinite_tensors[0] == "logged"
    y, other = (output.metrics for output in report.outputs)
    assert y["nonfinite"] == 0
    assert y["sqnr_db"] > 50
    assert other["sqnr_db"] > 50
    read_report(tmp_path / "out" / "report.json")
    assert "NaN" not in (tmp_path / "out" / "report.json").read_text().replace('"NaN"', "")


def test_a_reference_that_is_broken_throughout(compared):
    fixture = small([node("Log", "x", "y")], {"y": FLOAT})
    report = compared(fixture, "fp16", [{"x": -np.abs(normal(4, 8)) - 1}])
    assert report.findings[0].kind == "reference-trust"
    assert loads(dumps(report), "report") == report


def test_infinities_that_are_meant(compared):
    """Scores of -inf, as masks are written: what both sides hold is no error."""
    mask = np.where(np.triu(np.ones((8, 8)), 1) > 0, -np.inf, 0)
    nodes = [
        node("MatMul", "x w", "scores"),
        node("Add", "scores mask", "masked"),
        node("Softmax", "masked", "y", axis=-1),
    ]
    fixture = small(nodes, {"y": FLOAT}, {"w": normal(8, 8), "mask": mask}, (8, 8))
    report = compared(fixture, "fp16", [{"x": normal(8, 8)}])
    assert report.outputs[0].metrics["sqnr_db"] > 50
    assert report.births == []
    assert "kl" in next(layer for layer in report.layers if layer.op_type == "Softmax").accumulated


def test_a_subgraph_is_one_layer(compared):
    outer = {"small": 0.5, "large": 2.0}

    def branch(weight):
        made = helper.make_node("Mul", ["doubled", weight], [f"by_{weight}"])
        return helper.make_graph(
            [made], weight, [], [helper.make_tensor_value_info(f"by_{weight}", FLOAT, None)]
        )

    nodes = [
        node("Add", "x x", "doubled"),
        node("ReduceMax", "doubled", "top", keepdims=0),
        node("Greater", "top limit", "is_large"),
        node("If", "is_large", "chosen", then_branch=branch("small"), else_branch=branch("large")),
        node("MatMul", "chosen w", "y"),
    ]
    fixture = small(nodes, {"y": FLOAT}, {**outer, "limit": 3.0, "w": normal(8, 8)})
    batches = [{"x": np.abs(normal(4, 8)) * scale} for scale in (0.1, 10.0)]
    report = compared(fixture, "fp16", batches)
    assert "/chosen" in {layer.name for layer in report.layers}
    assert report.outputs[0].metrics["sqnr_db"] > 50
    assert report.births == []


def test_an_output_that_other_layers_read_too(compared):
    nodes = [node("MatMul", "x w", "middle"), node("Relu", "middle", "y")]
    fixture = small(nodes, {"y": FLOAT, "middle": FLOAT}, {"w": normal(8, 8)})
    report = compared(fixture, "int8", [{"x": normal(4, 8)}])
    by_name = {output.name: output.metrics["sqnr_db"] for output in report.outputs}
    assert by_name.keys() == {"y", "middle"}
    assert 25 < by_name["middle"] < 60


@pytest.mark.parametrize("fmt", ["fp16", "int8", "fp32"])
def test_an_output_that_is_only_reshaped(compared, fmt):
    fixture = small(
        [node("MatMul", "x w", "flat"), node("Transpose", "flat", "y", perm=[1, 0])],
        {"y": FLOAT},
        {"w": normal(8, 8)},
    )
    report = compared(fixture, fmt, [{"x": normal(4, 8)}])
    assert [output.name for output in report.outputs] == ["y"]
    assert (report.outputs[0].metrics["sqnr_db"] == math.inf) == (fmt == "fp32")


def test_an_operand_that_is_zero_throughout(compared):
    """Its scale would be zero; the product is zero in both."""
    nodes = [node("Mul", "x zero", "gone"), node("MatMul", "gone w", "y")]
    fixture = small(nodes, {"y": FLOAT}, {"zero": 0.0, "w": normal(8, 8)})
    report = compared(fixture, "int8", [{"x": normal(4, 8)}])
    assert report.outputs[0].metrics["sqnr_db"] == math.inf
    assert report.births == []


def test_empty_and_scalar_tensors(compared):
    """No rows at all in a batch; a reduction to a scalar."""
    nodes = [node("MatMul", "x w", "y"), node("ReduceSum", "y", "total", keepdims=0)]
    fixture = small(nodes, {"y": FLOAT, "total": FLOAT}, {"w": normal(8, 8)}, total=())
    report = compared(fixture, "fp16", [{"x": normal(4, 8)}, {"x": normal(0, 8)}, {"x": normal(1, 8)}])
    y = next(output for output in report.outputs if output.name == "y")
    assert y.metrics["elements"] == 5 * 8
    assert y.metrics["sqnr_db"] > 50


def test_names_that_mean_something_elsewhere(compared, tmp_path):
    """Markup, HTML, YAML and paths in names: they come out as they went in, and the mend finds them."""
    odd = "re:[/red]<b>&'\"glob:*{x}: #\\"
    planted = swiglu_overflow(llama())
    model = copied(planted.fixture.model)
    culprit = next(node for node in model.graph.node if node.name == planted.culprit)
    culprit.name = odd
    fixture = replace(planted.fixture, model=model)
    report = compared(fixture, "fp16", 1)
    assert report.births[0].layer == odd
    again = compared(fixture, None, 1, plan=str(tmp_path / "out" / "mend.yaml"), out=str(tmp_path / "mended"))
    assert again.outputs[0].metrics["sqnr_db"] > 40


@pytest.mark.parametrize(("axis", "decides"), [(-1, True), (2, True), (1, False)])
def test_classes_that_a_model_gives_out_are_decisions(compared, axis, decides):
    """Top-1 by its definition; of a softmax along another axis, or inside the model, there is none."""
    nodes = [
        node("MatMul", "x w", "scores"),
        node("Softmax", "scores", "inside", axis=-1),
        node("MatMul", "inside v", "mixed"),
        node("Softmax", "mixed", "out", axis=axis),
    ]
    weights = {"w": normal(8, 9), "v": normal(9, 5)}
    fixture = small(nodes, {"out": FLOAT}, weights, shape=("n", 6, 8), out=(None, 6, 5))
    batches = [{"x": normal(4, 6, 8)} for _ in range(3)]
    report = compared(fixture, "int8", batches)
    got = report.outputs[0].metrics
    by_hand = Stepwise(fixture.model, "int8", batches)
    pairs = zip(by_hand.reference, by_hand.accumulated, strict=True)
    same = [(a["out"].argmax(-1) == b["out"].argmax(-1)).mean() for a, b in pairs]
    assert got.get("top1") == (pytest.approx(np.mean(same)) if decides else None)
    assert ("kl" in got, "flips" in got) == (True, decides)
    inside = next(layer for layer in report.layers if layer.id == "/inside")
    assert "top1" not in inside.accumulated


@pytest.mark.parametrize(("shape", "decides"), [((-1, 2, 3, 5), True), ((-1, 3, 10), False)])
def test_classes_may_change_their_shape_behind_the_softmax(compared, shape, decides):
    """As the converter of opsets writes it: the rows stay, or they are cut anew and hold no distribution."""
    nodes = [
        node("MatMul", "x w", "scores"),
        node("Softmax", "scores", "classes", axis=-1),
        node("Identity", "classes", "same"),
        node("Constant", "", "shape", value_ints=list(shape)),
        node("Reshape", "same shape", "out"),
    ]
    fixture = small(nodes, {"out": FLOAT}, {"w": normal(8, 5)}, shape=("n", 6, 8), out=(None, *shape[1:]))
    batches = [{"x": normal(4, 6, 8)} for _ in range(3)]
    got = compared(fixture, "int8", batches).outputs[0].metrics
    by_hand = Stepwise(fixture.model, "int8", batches)
    pairs = zip(by_hand.reference, by_hand.accumulated, strict=True)
    same = [(a["classes"].argmax(-1) == b["classes"].argmax(-1)).mean() for a, b in pairs]
    assert got.get("top1") == (pytest.approx(np.mean(same)) if decides else None)
    assert ("kl" in got) == decides
