"""The verdict: effect sizes, held against what the calibration data show against themselves."""

from __future__ import annotations

import numpy as np
import pytest
from drift_tools import production, table

from diag.drift.judge import judge_tensor, null_figures, verdict_of
from diag.drift.rules import drift_rules
from diag.drift.side import sides_of_table

RULES = drift_rules()
LAWS = {
    "normal": lambda rng, n: rng.normal(0, 1, n),
    "laplace": lambda rng, n: rng.laplace(0, 1, n),
    "lognormal": lambda rng, n: rng.lognormal(0, 1, n),
    "relu": lambda rng, n: np.maximum(rng.normal(0, 1, n), 0),
    "softmax": lambda rng, n: rng.beta(0.2, 8, n),
}


def judged(law, change=lambda x: x, size=200_000, seed=0, method="minmax"):
    rng = np.random.default_rng(seed)
    made = table({"x": [law(rng, 50_000), law(rng, 50_000)]}, method)
    step = made.scales("int8")["x"]
    return judge_tensor("x", sides_of_table(made)["x"], production(change(law(rng, size)), step), RULES)


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
@pytest.mark.parametrize("law", LAWS)
def test_more_of_the_same_is_silent(law: str, method: str) -> None:
    for seed in range(3):
        assert judged(LAWS[law], seed=seed, method=method).level == "ok"


@pytest.mark.parametrize("law", ["normal", "laplace", "relu"])
def test_four_times_the_scale_is_drift_however_much_there_is_of_it(law: str) -> None:
    found = [judged(LAWS[law], lambda x: 4 * x, size) for size in (2_000, 20_000, 1_000_000)]
    assert {one.level for one in found} == {"fail"}
    losses = [one.figures["sqnr_loss_db"].value for one in found]
    assert max(losses) - min(losses) < 2
    assert all("sqnr_loss_db" in one.reasons for one in found)


@pytest.mark.parametrize("size", [2_000, 20_000, 1_000_000, 3_000_000])
def test_a_shift_that_matters_to_no_quantizer_is_silent_however_much_there_is_of_it(size: int) -> None:
    """A tenth of a step: any test of significance rejects equality once there is enough data."""
    assert judged(LAWS["normal"], lambda x: x * 1.02, size).level == "ok"


def test_values_that_shrink_leave_the_range_unused() -> None:
    found = judged(LAWS["normal"], lambda x: x / 20)
    assert found.level == "fail"
    assert found.figures["under_use"].level == "fail"
    assert found.figures["saturation"].level == "ok"


def test_rare_clipping_is_seen_by_its_share() -> None:
    def some(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[: len(x) // 50] *= 5
        return x

    found = judged(LAWS["normal"], some)
    assert found.figures["saturation"].level in ("warn", "fail")
    assert found.level != "ok"


def test_clipping_that_the_calibration_method_chose_is_no_drift() -> None:
    """percentile 99 clips 1 % of the calibration data themselves: three times that would be drift."""
    rng = np.random.default_rng(0)
    made = table({"x": [rng.normal(0, 1, 50_000) for _ in range(2)]}, "percentile_99")
    step, side = made.scales("int8")["x"], sides_of_table(made)["x"]
    same = judge_tensor("x", side, production(rng.normal(0, 1, 100_000), step), RULES)
    assert same.figures["saturation"].value == pytest.approx(0.01, rel=0.2)
    assert same.level == "ok"
    wider = judge_tensor("x", side, production(rng.normal(0, 2, 100_000), step), RULES)
    assert wider.figures["saturation"].level == "fail"


def test_what_the_halves_show_against_each_other_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    narrow, wide = rng.normal(0, 1, 50_000), rng.normal(0, 5, 50_000)
    other = rng.normal(0, 12, 100_000)
    torn = table({"x": [narrow, wide]})
    whole = table({"x": [wide, wide[::-1] * 1.01]})
    figures = null_figures(sides_of_table(torn)["x"])
    assert figures is not None
    assert figures["sqnr_loss_db"] > 6
    for made, level in ((torn, "ok"), (whole, "fail")):
        step = made.scales("int8")["x"]
        found = judge_tensor("x", sides_of_table(made)["x"], production(other, step), RULES)
        assert (found.figures["sqnr_loss_db"].level, found.figures["saturation"].level) == (level, level)


def test_not_finite_is_drift_and_counted() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 50_000)
    made = table({"x": [values, values[::-1]]})
    side = production(values, made.scales("int8")["x"])
    broken = type(side)(side.spread, side.minimum, side.maximum, nonfinite=3)
    assert judge_tensor("x", sides_of_table(made)["x"], side, RULES).level == "ok"
    found = judge_tensor("x", sides_of_table(made)["x"], broken, RULES)
    assert (found.level, found.nonfinite) == ("fail", 3)


def test_a_tensor_that_was_zero_and_no_longer_is() -> None:
    made = table({"x": [np.zeros(1000), np.zeros(1000)]})
    values = np.random.default_rng(0).normal(0, 1, 1000)
    found = judge_tensor("x", sides_of_table(made)["x"], production(values, made.scales("int8")["x"]), RULES)
    assert found.level == "fail"
    zeros = judge_tensor(
        "x", sides_of_table(made)["x"], production(np.zeros(50), made.scales("int8")["x"]), RULES
    )
    assert zeros.level == "ok"


def test_the_first_in_graph_order_is_the_cause() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, 40_000)
    made = table({name: [base, base[::-1] * 0.99] for name in "abcde"})
    step, sides = made.scales("int8")["a"], sides_of_table(made)
    factors = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 9.0, "e": 1.0}
    found = [judge_tensor(n, sides[n], production(base * f, step), RULES) for n, f in factors.items()]
    verdict = verdict_of(found)
    assert (verdict.level, verdict.cause, verdict.consequences) == ("fail", "c", ("d",))
    assert verdict_of([found[0], found[1]]).cause is None
    assert verdict_of([]).level == "ok"
