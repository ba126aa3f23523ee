"""Verdicts on planted gaps, each with the case beside it that must not be blamed."""

from __future__ import annotations

import math

import pytest

from diag.compare.selfcheck import SelfCheck
from diag.compare.split import Gaps, Verdict, engine_rules, observer_verdict, split


def lowered(format_gap: float, total_gap: float, **more: float) -> Verdict:
    return split(Gaps(format_gap, abs(total_gap - format_gap), total_gap, **more))


def fp32(
    total_gap: float, *, tf32: bool = False, tf32_gap: float | None = None, noise: float = 0.0
) -> Verdict:
    gaps = Gaps(0.0, total_gap, total_gap, noise_gap=noise, tf32=tf32, tf32_gap=tf32_gap, lowered=False)
    return split(gaps)


@pytest.mark.parametrize(
    ("format_gap", "total_gap", "kind"),
    [
        (0.22, 0.221, "format"),  # MiniLM in INT8: cosine 0.9759 emulated, 0.9758 built
        (0.2, 0.55, "unclear"),
        (1.0, 1.0, "format"),  # SmolLM2 in FP16
        (math.inf, math.inf, "format"),
        (0.001, 0.0012, "agreement"),
        (0.001, 0.009, "agreement"),  # nine times is no proof, and nobody minds
        (0.001, 0.011, "engine-defect"),
        (0.001, 1.2, "engine-defect"),
        (0.001, math.inf, "engine-defect"),
        (0.0, 0.4, "engine-defect"),
        (0.05, 0.3, "unclear"),
        (0.00001, 0.0008, "agreement"),  # eighty times nearly nothing
        (0.9, 0.002, "agreement"),
        (math.inf, 0.002, "agreement"),
    ],
)
def test_lowered_plans(format_gap: float, total_gap: float, kind: str) -> None:
    verdict = lowered(format_gap, total_gap)
    assert verdict.kind == kind
    assert verdict.numbers["format_rel_l2"] == format_gap
    assert verdict.numbers["total_rel_l2"] == total_gap


def test_the_noise_floor_excuses() -> None:
    assert lowered(0.001, 0.02).kind == "engine-defect"
    assert lowered(0.001, 0.02, noise_gap=0.01).kind == "agreement"


def test_better_than_its_format_is_asked_about() -> None:
    assert "was it built so?" in lowered(0.5, 0.001).text


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (fp32(3e-6), "agreement"),
        (fp32(2e-3), "engine-defect"),
        (fp32(1.2), "engine-defect"),
        (fp32(2e-3, noise=1e-3), "agreement"),
        (fp32(7e-4, tf32=True, tf32_gap=7e-4), "tf32-default"),
        (fp32(5e-3, tf32=True, tf32_gap=4e-3), "tf32-default"),
        (fp32(1.2e-2, tf32=True, tf32_gap=4e-3), "tf32-default"),
        (fp32(2e-2, tf32=True, tf32_gap=4e-3), "engine-defect"),
        (fp32(3e-6, tf32=True, tf32_gap=4e-3), "agreement"),  # on, and not used
        (fp32(5e-3, tf32=True), "unclear"),
        (fp32(5e-3, tf32=False, tf32_gap=4e-3), "engine-defect"),
    ],
)
def test_fp32_engines(verdict: Verdict, kind: str) -> None:
    assert verdict.kind == kind


def check(test: str, status: str, rel_l2: float) -> SelfCheck:
    return SelfCheck(test, "y", status, rel_l2, 1.0, 2, 1e-3)  # type: ignore[arg-type]


def test_a_contradiction_voids_every_theory_of_formats() -> None:
    gaps = Gaps(0.2, 0.001, 0.2)
    assert split(gaps).kind == "format"
    verdict = split(gaps, [check("one_by_one", "contradiction", 0.8), check("same_call", "agrees", 0.0)])
    assert verdict.kind == "batch-or-shape"
    assert verdict.numbers["one_by_one_rel_l2"] == 0.8
    assert verdict.is_fault


def test_unequal_calls_come_before_unequal_rows() -> None:
    checks = [check("identical_rows", "contradiction", 0.8), check("same_call", "contradiction", 0.1)]
    assert split(Gaps(0.2, 0.001, 0.2), checks).kind == "nondeterministic"


@pytest.mark.parametrize("status", ["agrees", "model", "not_run"])
def test_what_proves_nothing_changes_nothing(status: str) -> None:
    assert split(Gaps(0.2, 0.001, 0.2), [check("one_by_one", status, 0.8)]).kind == "format"


def test_marks_against_the_rebuild_noise() -> None:
    assert observer_verdict(Gaps(0.1, 0.1, 0.1)) is None
    healthy = observer_verdict(Gaps(0.1, 0.1, 0.1, noise_gap=0.0117, marked_gap=0.0103))  # FP16 MiniLM
    assert healthy is not None
    assert healthy.kind == "agreement"
    moved = observer_verdict(Gaps(0.1, 0.1, 0.1, noise_gap=0.01, marked_gap=0.5))
    assert moved is not None
    assert moved.kind == "observer-effect"
    assert moved.numbers == {"marked_rel_l2": 0.5, "noise_rel_l2": 0.01}


def test_row_tolerance_has_a_floor_and_a_ceiling() -> None:
    rules = engine_rules()
    assert rules.row_tolerance(2.0**-24) == rules.row_floor_rel_l2
    assert rules.row_tolerance(2.0**-11) == pytest.approx(10 * 2.0**-11)
    assert rules.row_tolerance(0.5) == rules.good_rel_l2
    assert rules.row_tolerance(2.0**-8, 0.24) == pytest.approx(
        0.12
    )  # INT8 MiniLM: flipped codes are no fault
    assert rules.row_tolerance(2.0**-11, 0.001) == pytest.approx(10 * 2.0**-11)
    assert rules.row_tolerance(2.0**-11, math.inf) == 0.5


@pytest.mark.parametrize(
    ("engine_gap", "kind"),
    [
        (0.12, "format"),  # MiniLM in INT8 on an H200: half of the format's own error
        (0.53, "unclear"),  # MiniLM in INT8 over FP16 there: cosine 0.858, emulated 0.979
    ],
)
def test_an_engine_far_from_its_own_emulation_is_not_excused(engine_gap: float, kind: str) -> None:
    assert split(Gaps(format_gap=0.21, engine_gap=engine_gap, total_gap=0.53)).kind == kind
