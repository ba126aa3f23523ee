"""The repair of pins on builds, with ONNX Runtime in the engine's place: right but for planted defects."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_tools import Workplace, workplace

from diag.cli import pin as command
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, OnnxRuntimeRunner
from diag.engines.stamp import Identity
from diag.errors import EngineError
from diag.pipeline.engine.builds import Builds
from diag.pipeline.engine.stage import Subject
from diag.pipeline.search.job import PinResult, pin_layers
from diag.pipeline.search.settings import Ceiling
from diag.progress import Silent
from diag.search.builds import Pointed, most_builds
from diag.search.target import Target


@dataclass
class _Wrong:
    runner: OnnxRuntimeRunner
    noise: float

    def run(self, feed: Feed) -> Mapping[str, Array]:
        rng = np.random.default_rng(0)
        found = self.runner.run(feed)
        return {n: a + self.noise * a.std() * rng.standard_normal(a.shape) for n, a in found.items()}


@dataclass
class StandIn:
    """The emulation, and twice the signal as noise where all layers of one of the `sick` sets are quantized.

    `high` sets are sick when all their layers are in FP16. It dies in build number `dies` (from 0).
    """

    sick: tuple[frozenset[str], ...] = ()
    high: tuple[frozenset[str], ...] = ()
    points: tuple[str, ...] = ()
    dies: int = -1
    fails: int = -1
    runs: bool = True
    name: str = "standin"
    identity: str = "standin 1"
    built: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    shipped: list[str] = field(default_factory=list)

    @contextmanager
    def open(self, subject: Subject, identity: Identity) -> Iterator[_Wrong]:
        self.built.append(identity.plan_sha256)
        if len(self.built) - 1 == self.dies:
            raise KeyboardInterrupt
        if len(self.built) - 1 == self.fails:
            raise EngineError("the builder crashed")
        formats = subject.typed.formats
        low = {name for name, fmt in formats.items() if fmt == "int8"}
        half = {name for name, fmt in formats.items() if fmt == "fp16"}
        wrong = any(s <= low for s in self.sick) or any(s <= half for s in self.high)
        yield _Wrong(OnnxRuntimeRunner.emulation(subject.typed.model), 2.0 if wrong else 0.0)

    def suspects(self, subject: Subject, identity: Identity, among: Collection[str]) -> Pointed:
        return Pointed(self.points)

    def drop(self, out: Path, identity: Identity) -> None:
        self.dropped.append(identity.plan_sha256)

    def kept(self, out: Path, identity: Identity) -> str:
        return "emulate"

    def finish(self, out: Path, identity: Identity) -> None:
        self.shipped.append(identity.plan_sha256)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return workplace(tmp_path_factory.mktemp("repair"))


@pytest.fixture(scope="module")
def emulated(place: Workplace) -> PinResult:
    return place.pin("emulated")


@pytest.fixture(scope="module")
def others(place: Workplace, emulated: PinResult) -> list[str]:
    """Candidates that the emulation leaves lowered, worst first."""
    ranked = [effect.candidate.id for effect in emulated.ranking.effects]
    return [pin for pin in ranked if pin not in emulated.search.pins]


def pinned(place: Workplace, builds: Builds, out: str, **changes: Any) -> PinResult:
    return pin_layers(place.settings(out, confirm="tensorrt", **changes), Silent(), builds)


def test_an_engine_that_holds_is_built_once(place: Workplace, emulated: PinResult) -> None:
    builds = StandIn()
    found = pinned(place, builds, "held")
    assert found.search.pins == emulated.search.pins
    assert (found.met, found.on_engine) == (True, True)
    assert len(builds.built) == 1
    assert found.builds is not None
    assert (found.builds.found.outcome, found.builds.found.builds) == ("held", 1)
    assert emulated.proof in found.proof
    assert builds.shipped == builds.built


def test_what_only_the_engine_needs_is_found_on_builds(
    place: Workplace, emulated: PinResult, others: list[str]
) -> None:
    """Two layers that hurt the engine only together: one of them is pinned, beside the emulation's."""
    builds = StandIn((frozenset(others[:2]),))
    found = pinned(place, builds, "repaired")
    assert set(emulated.search.pins) < set(found.search.pins)
    assert len(set(found.search.pins) & set(others[:2])) == 1
    assert len(found.search.pins) == len(emulated.search.pins) + 1
    assert (found.met, found.on_engine, found.search.minimal) == (True, True, True)
    assert (
        len(set(builds.built))
        == len(builds.built)
        <= most_builds(len(emulated.ranking.effects), len(found.search.pins))
    )
    assert found.report is not None
    assert found.report.search is not None
    assert found.report.search.proof.startswith("1-minimal on builds")
    assert sum(note.startswith("Build ") for note in found.report.search.notes) == len(builds.built)
    assert "found on builds" in found.report.verdict
    plan = (place.folder / "repaired" / "plan.yaml").read_text()
    assert all(name in plan for name in found.search.pins)
    assert found.report.plan is not None
    assert builds.built[0] not in builds.dropped  # what the engine points at is read from it
    assert builds.shipped == [found.report.plan.sha256]  # what ships is what was reported


def test_where_the_limit_is_reached_the_set_is_verified_and_said_to_be_no_more(
    place: Workplace, emulated: PinResult, others: list[str]
) -> None:
    """The culprit is the last that anyone would look at."""
    builds = StandIn((frozenset(others[-1:]),))
    found = pinned(place, builds, "late")
    assert found.met
    assert others[-1] in found.search.pins
    assert len(builds.built) <= most_builds(len(emulated.ranking.effects), len(found.search.pins))
    assert not found.search.minimal
    assert found.proof.startswith("Verified on builds, not proven minimal")


def test_what_the_engine_points_at_comes_first(place: Workplace, others: list[str]) -> None:
    """The same, with a pointer: fewer builds."""
    sick = (frozenset(others[3:4]),)
    blind, led = StandIn(sick), StandIn(sick, points=(others[3], "no layer of the plan"))
    assert set(pinned(place, blind, "blind").search.pins) == set(pinned(place, led, "led").search.pins)
    assert len(led.built) < len(blind.built)


def test_a_target_that_holds_on_the_emulation_without_pins(
    place: Workplace, emulated: PinResult, others: list[str]
) -> None:
    """Nothing was ranked: the order is the graph's."""
    assert emulated.report is not None
    assert emulated.report.search is not None
    start = next(p.value for p in emulated.report.search.points if p.kind == "start")
    target = f"sqnr_db>={start - 0.5}"
    held = pinned(place, StandIn(), "none-needed", target=target)
    assert (held.search.outcome, held.met) == ("not-needed", True)
    found = pinned(place, StandIn((frozenset(others[1:2]),)), "one-needed", target=target)
    assert found.builds is not None
    assert found.builds.emulated == ()
    assert (found.met, found.search.pins, found.search.minimal) == (True, others[1:2], True)


def test_an_engine_that_misses_with_everything_raised(place: Workplace, emulated: PinResult) -> None:
    builds = StandIn((frozenset(),))
    found = pinned(place, builds, "impossible")
    assert (found.met, found.on_engine) == (False, False)
    assert len(builds.built) == 4  # the pins and everything, in FP16 and in FP32
    assert found.search.pins == emulated.search.pins
    assert "not on standin" in found.verdict
    assert "every candidate raised" in found.verdict


def test_where_fp16_itself_is_wrong_fp32_is_taken(place: Workplace, emulated: PinResult) -> None:
    culprit = frozenset(emulated.search.pins[:1])
    found = pinned(place, StandIn(high=(culprit,)), "fp32")
    assert (found.met, found.format, found.search.pins) == (True, "fp32", emulated.search.pins)
    assert found.builds is not None
    assert found.builds.found.builds == 3


def test_a_killed_search_goes_on_where_it_was(place: Workplace, others: list[str]) -> None:
    sick = (frozenset(others[2:4]),)
    whole = StandIn(sick, identity="whole")
    expected = pinned(place, whole, "whole")
    killed = StandIn(sick, dies=2, identity="killed")
    with pytest.raises(KeyboardInterrupt):
        pinned(place, killed, "killed")
    again = StandIn(sick, identity="killed")
    found = pinned(place, again, "killed")
    assert killed.built[:2] + again.built == whole.built
    assert found.builds == expected.builds


def test_another_version_of_the_engine_is_asked_anew(place: Workplace) -> None:
    first, newer = StandIn(identity="10.6"), StandIn(identity="10.7")
    pinned(place, first, "versions")
    pinned(place, newer, "versions")
    assert first.built == newer.built


def test_a_build_that_fails_does_not_hold(place: Workplace, others: list[str]) -> None:
    builds = StandIn((frozenset(others[3:4]),), fails=2)
    found = pinned(place, builds, "crash")
    assert found.met
    assert found.builds is not None
    assert [t.values for t in found.builds.trials if "crashed" in t.values] == ["the builder crashed"]


def test_the_first_build_must_work(place: Workplace) -> None:
    with pytest.raises(EngineError, match="crashed"):
        pinned(place, StandIn(fails=0), "first-crash")


def test_pins_over_the_ceiling_are_not_taken(
    place: Workplace, emulated: PinResult, others: list[str]
) -> None:
    builds = StandIn((frozenset(others[2:4]),))
    most = len(emulated.search.pins)
    found = pinned(place, builds, "ceiling", ceiling=Ceiling(pins=most))
    assert (found.met, found.search.pins) == (False, emulated.search.pins)
    assert "more than the ceiling allows" in found.verdict


def test_engines_that_are_not_run_are_only_built(place: Workplace) -> None:
    """As TensorRT-RTX without its GPU: no numbers, no search."""
    builds = StandIn(runs=False, name="emulate")
    found = pinned(place, builds, "not-run")
    assert found.builds is None
    assert not builds.built


def test_what_is_printed_and_given_as_json(place: Workplace, others: list[str]) -> None:
    found = pinned(place, StandIn((frozenset(others[2:4]),)), "printed")
    text = command._text(found, Target(place.settings().target), "out")
    assert "\nheld out: " in text  # metrics of the emulation, on the batches that did not choose for it
    assert "Build 1: " in text
    assert "misses." in text
    assert "holds the target (" in text
    assert "on builds: not one of the pins of the emulation; without it last_hidden_state sqnr_db" in text
    body = json.loads(json.dumps(command._body(found)))["on_builds"]
    assert body["outcome"] == "repaired"
    assert body["builds"] == len(body["trials"]) <= body["limit"]
    assert body["trials"][0]["met"] is False
    assert body["pins"] == found.search.pins
