"""The gate's semantics, with negative controls: nothing passes for lack of evidence."""

from __future__ import annotations

import math

import pytest

from diag.errors import UsageError
from diag.gate.evaluate import evaluate
from diag.gate.threshold import parse_threshold
from diag.report.schema import GateResult, ModelInfo, OutputInfo, Report, RunInfo


def _report(**outputs: dict[str, float]) -> Report:
    return Report(
        model=ModelInfo(path="m.onnx", sha256="0", opset=17, node_count=1),
        run=RunInfo(
            command="",
            engine="emulate",
            versions={},
            batches=1,
            samples=1,
            seconds=1,
            peak_memory_mb=1,
            started="",
        ),
        outputs=[OutputInfo(name=name, metrics=metrics) for name, metrics in outputs.items()],
    )


def _gate(text: str, **outputs: dict[str, float]) -> GateResult:
    return evaluate(_report(**outputs), [parse_threshold(part) for part in text.split()])


@pytest.mark.parametrize(
    ("text", "value", "passed"),
    [
        ("sqnr_db>=30", 30.0, True),
        ("sqnr_db>=30", 29.999, False),
        ("sqnr_db>30", 30.0, False),
        ("sqnr_db>=30", math.inf, True),
        ("sqnr_db>=30", -math.inf, False),
        ("rel_l2<=0.1", 0.1, True),
        ("rel_l2<0.1", 0.1, False),
        ("nonfinite==0", 0.0, True),
        ("nonfinite==0", 1.0, False),
        ("top1>=0.99", 0.98, False),
        ("mean_error<=0.01", -5.0, False),
        ("mean_error<=0.01", -0.005, True),
    ],
)
def test_bounds(text: str, value: float, passed: bool) -> None:
    metric = parse_threshold(text).metric
    assert _gate(text, y={metric: value}).passed is passed


@pytest.mark.parametrize("op", [">=", ">", "<=", "<", "=="])
@pytest.mark.parametrize("bound", ["0", "inf", "-inf"])
def test_nan_never_passes(op: str, bound: str) -> None:
    assert not _gate(f"sqnr_db{op}{bound}", y={"sqnr_db": math.nan}).passed


def test_missing_metric_never_passes() -> None:
    gate = _gate("top1>=0", y={"sqnr_db": 50.0})
    assert not gate.passed
    assert gate.checks[0].value is None
    assert "not measured" in gate.checks[0].name


def test_each_output_is_checked() -> None:
    gate = _gate("sqnr_db>=30", a={"sqnr_db": 50.0}, b={"sqnr_db": 10.0})
    assert [(check.name, check.passed) for check in gate.checks] == [
        ("a:sqnr_db>=30", True),
        ("b:sqnr_db>=30", False),
    ]
    assert not gate.passed


def test_named_output_alone_is_checked() -> None:
    gate = _gate("a:sqnr_db>=30", a={"sqnr_db": 50.0}, b={"sqnr_db": 10.0})
    assert gate.passed
    assert len(gate.checks) == 1


def test_unknown_output_is_refused() -> None:
    with pytest.raises(UsageError, match="no output"):
        _gate("c:sqnr_db>=30", a={"sqnr_db": 50.0})


def test_report_without_outputs_never_passes() -> None:
    gate = _gate("sqnr_db>=0")
    assert not gate.passed
    assert "no outputs" in gate.checks[0].name


def test_gate_without_thresholds_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to check"):
        evaluate(_report(y={"sqnr_db": 50.0}), [])


def test_output_without_elements_never_passes() -> None:
    metrics = {"sqnr_db": math.inf, "elements": 0.0}
    assert not _gate("sqnr_db>=30", y=metrics).passed
    assert _gate("elements<=0", y=metrics).passed


@pytest.mark.parametrize("count", [3.0, math.nan])
def test_nonfinite_output_fails_quality(count: float) -> None:
    gate = _gate("sqnr_db>=30", y={"sqnr_db": 50.0, "nonfinite": count})
    assert not gate.passed
    assert "not finite" in gate.checks[0].name


def test_nonfinite_elements_pass_where_a_threshold_allows_them() -> None:
    metrics = {"sqnr_db": 50.0, "nonfinite": 3.0}
    assert _gate("sqnr_db>=30 nonfinite<=3", y=metrics).passed
    assert not _gate("sqnr_db>=30 nonfinite<=2", y=metrics).passed
    assert not _gate("a:nonfinite<=3 sqnr_db>=30", a=metrics, b=metrics).passed
