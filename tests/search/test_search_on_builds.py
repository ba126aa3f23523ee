"""What a search on builds says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diag.gate.threshold import parse_threshold
from diag.pipeline.search.on_builds import BuildTrial, OnBuilds, values_of
from diag.search.builds import BuildSearch

FIRST = BuildTrial(("a",), "fp16", "cosine 0.9", False)
GOOD = BuildTrial(("a", "b"), "fp16", "cosine 0.995", True)
FOUND = BuildSearch("repaired", ("a", "b"), True, 2, 6)
REPAIRED = OnBuilds("tensorrt", FOUND, "fp16", ("a",), (FIRST, GOOD), 4, {})


def test_a_repair_names_what_missed_and_how_far_it_is_proven() -> None:
    assert REPAIRED.met
    assert REPAIRED.remark == (
        " on tensorrt, found on builds: with the 1 pin of the emulation in FP16 it misses there"
    )
    assert (
        REPAIRED.proof == "1-minimal on builds: taking any pin away misses the target (2 builds on tensorrt)."
    )
    assert REPAIRED.notes == [
        "Build 1: 1 pin in FP16, those found without b: cosine 0.9: misses.",
        "Build 2: 2 pins in FP16: cosine 0.995: holds.",
    ]


@pytest.mark.parametrize(
    ("changes", "emulated", "met", "remark", "proof"),
    [
        (
            {"minimal": False},
            ("a",),
            True,
            "found on builds",
            "not proven minimal (2 builds on tensorrt; 6 are",
        ),
        (
            {"outcome": "held", "builds": 1},
            ("a",),
            True,
            "",
            "with 1 build on tensorrt; whether a pin can go",
        ),
        ({"outcome": "held", "builds": 1}, (), True, "", "Verified on the engine with 1 build on tensorrt."),
        ({"outcome": "impossible"}, ("a",), False, "and with every candidate raised", "Not verified"),
        ({"outcome": "impossible"}, (), False, "with no pins, as emulated", "Not verified"),
    ],
)
def test_what_is_claimed(
    changes: dict[str, object], emulated: tuple[str, ...], met: bool, remark: str, proof: str
) -> None:
    said = replace(REPAIRED, found=replace(FOUND, **changes), emulated=emulated)  # type: ignore[arg-type]
    assert said.met is met
    assert remark in said.remark
    assert bool(remark) == bool(said.remark)
    assert proof in said.proof
    assert met or "minimal" not in said.proof  # nothing is claimed of what missed


def test_what_each_pin_buys_on_builds() -> None:
    assert (
        REPAIRED.without("b") == "not one of the pins of the emulation; without it cosine 0.9, which misses"
    )
    assert REPAIRED.without("a") == "not built without it"


def test_a_set_over_the_ceiling_is_no_success() -> None:
    dear = replace(REPAIRED, too_dear=True)
    assert not dear.met
    assert "needs 2 pins, more than the ceiling allows" in dear.remark
    assert "minimal" not in dear.proof


def test_values_are_those_of_the_target_and_lost_ones_are_said() -> None:
    metrics = {"y": {"cosine": float("nan"), "nonfinite": 12.0}, "z": {"cosine": 0.5, "kl": 1.0}}
    both, one = parse_threshold("cosine>=0.9"), parse_threshold("z:cosine>=0.9")
    assert values_of(metrics, [both]) == "y cosine nan (12 values not finite), z cosine 0.5"
    assert values_of(metrics, [one]) == "z cosine 0.5"
