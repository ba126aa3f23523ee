"""Quantizers that cost accuracy and buy no time, and pins that random data do not ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from search_tools import Workplace, workplace

from diag.model.load import load_model
from diag.pipeline.search.settings import Ceiling
from diag.pipeline.search.setup import set_up
from diag.pipeline.search.stability import unstable_pins
from diag.progress import Silent
from diag.report.io import write_report
from diag.report.schema import Kernel, ModelInfo, PlanInfo, Report, RunInfo
from diag.search.pins import PinSearch
from diag.search.rank import Ranking

RUN = RunInfo(
    command="", engine="", versions={}, batches=0, samples=0, seconds=0, peak_memory_mb=0, started=""
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return workplace(tmp_path_factory.mktemp("idle"))


def timed(place: Workplace, fmt: str, times: dict[str, float]) -> str:
    model = load_model(place.model)
    path = place.folder / f"{fmt}.json"
    kernels = [Kernel(name=f"k{i}", layers=[n], time_ms=t) for i, (n, t) in enumerate(times.items())]
    info = ModelInfo(path="m", sha256=model.sha256, opset=17, node_count=1)
    write_report(Report(model=info, plan=PlanInfo(default=fmt, sha256=""), run=RUN, kernels=kernels), path)
    return str(path)


def layers(place: Workplace) -> list[str]:
    model = load_model(place.model)
    return [layer.id for layer in model.layers if layer.op_type in ("MatMul", "Gemm")]


def test_a_quantizer_that_only_hurts_is_dropped_and_one_that_buys_time_stays(place: Workplace) -> None:
    names = layers(place)
    plain = place.pin("plain")
    culprit = place.planted.culprit
    others = [e for e in plain.ranking.effects if e.candidate.id != culprit and len(e.candidate.layers) == 1]
    worst = next(e.candidate.id for e in others if e.lowered_mean > 0 and e.raised_mean > 0)
    low = timed(place, "int8", dict.fromkeys(names, 1.0))
    high = timed(place, "fp16", dict.fromkeys(names, 1.5) | {worst: 0.9})
    found = place.pin("timed", prices=(low, high))
    assert found.search.idle == {worst}
    assert set(found.search.pins) == {culprit, worst}
    report = json.loads((place.folder / "timed" / "report.json").read_text())
    assert report["search"]["measured_prices"]
    costs = {f["layers"][0]: f["evidence"]["price"] for f in report["findings"] if f["id"].startswith("pin:")}
    assert costs == {culprit: "+0.5 ms", worst: "-0.1 ms"}


def test_estimates_drop_nothing(place: Workplace) -> None:
    assert place.pin("estimated").search.idle == frozenset()


def test_a_plain_plan_that_is_better_and_no_slower_wins_the_verdict(place: Workplace) -> None:
    names = layers(place)
    fast = (timed(place, "int8", dict.fromkeys(names, 1.0)), timed(place, "fp16", dict.fromkeys(names, 0.9)))
    found = place.pin("fast", prices=fast)
    assert "everything in FP16 is better and no slower (by measured time): take that plan" in found.verdict


def test_a_plain_plan_that_is_slower_does_not(place: Workplace) -> None:
    names = layers(place)
    slow = (timed(place, "int8", dict.fromkeys(names, 1.0)), timed(place, "fp16", dict.fromkeys(names, 1.5)))
    assert "take that plan" not in place.pin("slow", prices=slow).verdict


def test_a_price_ceiling_in_ms_keeps_to_measured_prices(place: Workplace) -> None:
    names = layers(place)
    prices = (
        timed(place, "int8", dict.fromkeys(names, 1.0)),
        timed(place, "fp16", dict.fromkeys(names, 1.5)),
    )
    assert place.pin("cheap", prices=prices, ceiling=Ceiling(price_ms=0.4)).search.outcome == "ceiling"
    assert place.pin("dear", prices=prices, ceiling=Ceiling(price_ms=0.6)).met


def test_a_pin_that_random_data_do_not_ask_for_is_unstable(tmp_path: Path) -> None:
    """The planted outlier is in the weights, so random images need its pin, and no harmless layer's."""
    vit = workplace(tmp_path, family="vit")
    search = set_up(vit.settings(), Silent())
    harmless = min(search.candidates, key=lambda c: search.variants.damage(search.target, c.layers, 0)).id
    ranking = Ranking([], 1.0, 1, True, 1.0)
    both = PinSearch("found", [vit.planted.culprit, harmless], True)
    assert unstable_pins(search, both, ranking, Silent()) == {harmless: "on random data"}


def test_a_model_that_random_data_break_is_told_and_nothing_is_marked(place: Workplace) -> None:
    notes: list[str] = []

    class Noted(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    search = set_up(place.settings("random"), Silent())  # its vocabulary is smaller than random ids
    pins = PinSearch("found", [place.planted.culprit], True)
    assert unstable_pins(search, pins, Ranking([], 1.0, 1, True, 1.0), Noted()) == {}
    assert "not held against random data" in notes[0]
