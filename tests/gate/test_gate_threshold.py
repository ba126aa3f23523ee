"""Thresholds: what is read, and what is refused with near names."""

from __future__ import annotations

import math

import pytest

from diag.errors import UsageError
from diag.gate.threshold import Threshold, parse_threshold, require_outputs
from diag.numerics.table import METRICS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sqnr_db>=30", Threshold("sqnr_db", ">=", 30.0)),
        (" top1 >= 0.99 ", Threshold("top1", ">=", 0.99)),
        ("logits:kl<1e-3", Threshold("kl", "<", 1e-3, "logits")),
        ("nonfinite==0", Threshold("nonfinite", "==", 0.0)),
        ("Identity:0:max_abs<=-.5", Threshold("max_abs", "<=", -0.5, "Identity:0")),
        ("a>b c:cosine>0.9", Threshold("cosine", ">", 0.9, "a>b c")),
        ("sqnr_db>=inf", Threshold("sqnr_db", ">=", math.inf)),
    ],
)
def test_reads(text: str, expected: Threshold) -> None:
    assert parse_threshold(text) == expected


def test_text_reads_back() -> None:
    threshold = Threshold("sqnr_db", ">=", 30.0, "logits")
    assert str(threshold) == "logits:sqnr_db>=30"
    assert parse_threshold(str(threshold)) == threshold


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sqnr_db",
        "sqnr_db=30",
        "sqnr_db=>30",
        "sqnr_db>=",
        ">=30",
        "30<=sqnr_db",
        "sqnr_db>=30>=20",
        "sqnr_db!=3",
    ],
)
def test_refuses_another_grammar(text: str) -> None:
    with pytest.raises(UsageError, match="not understood"):
        parse_threshold(text)


@pytest.mark.parametrize("bound", ["30dB", "99%", "many", "nan", "0x10"])
def test_refuses_bounds_that_are_no_numbers(bound: str) -> None:
    with pytest.raises(UsageError):
        parse_threshold(f"sqnr_db>={bound}")


def test_unknown_metric_lists_near_names() -> None:
    with pytest.raises(UsageError, match=r"Did you mean sqnr_db") as caught:
        parse_threshold("sqnr>=30")
    assert caught.value.exit_code == 2


def test_unknown_metric_without_near_names_lists_all() -> None:
    with pytest.raises(UsageError) as caught:
        parse_threshold("zzzzzz>=30")
    assert all(name in caught.value.hint for name in METRICS)


def test_unknown_output_lists_near_names() -> None:
    with pytest.raises(UsageError, match="logits"):
        require_outputs([Threshold("top1", ">=", 0.9, "logit")], ["logits", "boxes"])


def test_thresholds_that_reward_damage_are_known() -> None:
    assert parse_threshold("sqnr_db<30").rewards_damage
    assert parse_threshold("mean_error>1").rewards_damage
    assert not parse_threshold("sqnr_db>=30").rewards_damage
    assert not parse_threshold("elements>=1000").rewards_damage
    assert not parse_threshold("nonfinite==0").rewards_damage


@pytest.mark.parametrize("metric", METRICS)
def test_table_of_metrics_is_complete(metric: str) -> None:
    row = METRICS[metric]
    assert row.name == metric
    assert row.meaning.endswith(".")
    assert row.better in {"higher", "lower", "zero", "none"}
