"""Why a layer is pinned: planted hazards by name and figure, healthy operands by silence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from search_tools import workplace

from diag.numerics.steps import StepSums
from diag.pipeline.search.explain import pins_of
from diag.pipeline.search.setup import set_up
from diag.progress import Silent
from diag.search.reasons import NONE_FOUND, Part, QuantizedOperand, quantized_reason

RNG = np.random.default_rng(7)


def operand(values: np.ndarray, top: float | None = None, part: Part = "input") -> QuantizedOperand:
    """An INT8 operand whose range ends at `top`, the largest magnitude where it is not given."""
    sums = StepSums((top or float(np.abs(values).max())) / 127, "int8")
    for half in np.array_split(values.astype(np.float32), 2):
        sums.update(half)
    return QuantizedOperand.of("x", part, sums)


def bell(channels: int = 64) -> np.ndarray:
    return RNG.normal(size=(512, channels)).astype(np.float32)


def test_sums_are_those_of_the_published_definition() -> None:
    values = RNG.normal(size=(40, 8)).astype(np.float32)
    values[:, 3] *= 30
    step = 0.05
    found = operand(values, top=127 * step)
    codes = np.clip(np.round(values.astype(np.float64) / step), -128, 127)
    error, beyond = values - codes * step, np.maximum(np.abs(values) - 127 * step, 0)
    energy = np.sum(values.astype(np.float64) ** 2)
    assert found.sqnr_db == pytest.approx(10 * math.log10(energy / np.sum(error**2)), rel=1e-4)
    assert found.clipped_energy_ratio == pytest.approx(np.sum(beyond**2) / energy, rel=1e-3)
    assert found.zeroed_share == pytest.approx(np.mean(codes == 0), abs=0.01)
    largest = np.abs(values).max(axis=0)
    assert found.channel == 3
    assert found.channel_ratio == pytest.approx(largest[3] / np.median(largest))


def test_a_healthy_operand_names_nothing() -> None:
    weight = QuantizedOperand("w", "weight", 44.0)
    assert quantized_reason([operand(bell()), weight]) is None
    sharp = np.exp(bell()) / np.exp(bell()).sum(axis=1, keepdims=True)
    assert quantized_reason([operand(sharp, part="probabilities")]) is None


def test_an_outlier_channel_is_named_with_its_factor() -> None:
    values = bell()
    values[:, 5] *= 100
    found = quantized_reason([operand(values)])
    assert found is not None
    assert found.kind == "shared-range"
    assert found.text.startswith("channel 5 of its input x reaches ")


def test_an_outlier_channel_that_zeroes_little_is_none() -> None:
    values = np.where(RNG.random((512, 64)) < 0.5, -3.0, 3.0)
    values[:, 5] *= 12
    assert quantized_reason([operand(values)]) is None


def test_what_the_range_cuts_off_is_said_before_all_else() -> None:
    found = quantized_reason([operand(bell(), top=1.0)])
    assert found is not None
    assert found.kind == "calibration-method"
    assert "of the energy of its input x (range 1, largest value " in found.text


def test_probabilities_below_half_a_step_are_named() -> None:
    flat = np.full((64, 400), 1 / 400) * RNG.uniform(0.5, 1.5, (64, 400))
    flat[0, 0] = 1.0  # one sure token sets the range: a step is 1/127, and the others are below half of it
    found = quantized_reason([operand(flat, part="probabilities")])
    assert found is not None
    assert "softmax probabilities that are not 0 are below half a step and become 0" in found.text


def test_probabilities_of_sure_rows_may_lose_the_rest() -> None:
    """Nearly all the energy is in one token: 0.001 of it and less is lost, though most elements become 0."""
    rows = RNG.uniform(0.5e-5, 1.5e-5, (64, 400))
    rows[:, 0] = 1 - rows[:, 1:].sum(axis=1)
    assert quantized_reason([operand(rows, part="probabilities")]) is None


def test_a_coarse_weight_is_named_and_the_worst_operand_speaks() -> None:
    values = bell()
    values[:, 5] *= 100
    found = quantized_reason([operand(values), QuantizedOperand("w", "weight", -5.0)])
    assert found is not None
    assert found.text == "its weight has too coarse steps by output channel (-5.0 dB)"


@pytest.mark.parametrize(
    ("fault", "family", "said"),
    [
        ("ffn-down-outlier", "bert", "channel 5 of its input"),
        ("value-outlier", "bert", "channel 5 of its input"),
        ("qk-overflow", "bert", "leaves the FP16 range"),
        ("norm-square-overflow", "gpt2", "the square inside a norm leaves the FP16 range"),
        ("tiny-eps", "llama", "guarded by a constant that vanishes in FP16"),
    ],
)
def test_a_planted_fault_is_the_reason_of_its_pin(fault: str, family: str, said: str, tmp_path: Path) -> None:
    place = workplace(tmp_path, fault, family)
    result = place.pin()
    assert result.report is not None
    pins = pins_of(result.report)
    assert len(pins) == len(result.search.pins)
    culprit = next(pin for pin in pins if place.planted.culprit in pin.layers)
    assert said in str(culprit.evidence["why"])
    assert culprit.kind == place.planted.kind


def test_a_pin_without_a_hazard_says_so_and_what_it_buys_in_the_set(tmp_path: Path) -> None:
    """The healthy part of the graph: beyond 36 dB pins are needed that nothing in their inputs explains."""
    place = workplace(tmp_path)
    result = place.pin(target="sqnr_db>=36")
    assert result.report is not None
    others = [pin for pin in pins_of(result.report) if place.planted.culprit not in pin.layers]
    assert others
    for pin in others:
        assert (pin.kind, pin.evidence["why"]) == ("sensitive-op", NONE_FOUND)


def test_in_the_set_is_what_the_proof_measured(tmp_path: Path) -> None:
    """With and without the pin, as variants of the model measured anew, on the batches that chose."""
    place = workplace(tmp_path)
    result = place.pin(target="sqnr_db>=36")
    assert result.report is not None
    anew = set_up(place.settings("anew", "sqnr_db>=36"), Silent())
    pins = set(result.search.pins)
    assert len(pins) > 1
    for pin in pins_of(result.report):
        low = anew.low(pins - {pin.layers[0]}), anew.low(pins)
        measured = [anew.variants.metrics(one, anew.chosen)["last_hidden_state"]["sqnr_db"] for one in low]
        words = str(pin.evidence["in_the_set"]).replace(",", "").split()
        without, with_it = float(words[3]), float(words[6])
        assert words[2] == "sqnr_db"
        assert [without, with_it] == pytest.approx(measured, rel=1e-4)
        assert without < 36 <= with_it
        assert words[-4] == "sqnr_db>=36;"


def test_a_drawn_group_that_is_larger_than_needed_says_which_layers_are_spare(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    place.pin("first")
    path = tmp_path / "first" / "ranking.json"
    body = json.loads(path.read_text())
    culprit, spare = body["groups"][0], next(g for g in body["groups"][1:] if g["kind"] == "layer")
    body["groups"].remove(spare)
    culprit["layers"] += spare["layers"]
    path.write_text(json.dumps(body))
    result = place.pin("drawn", ranking=str(path))
    assert result.report is not None
    (pin,) = pins_of(result.report)
    said = str(pin.evidence["together"])
    assert said == (
        f"2 layers were drawn as one group in the ranking; the target holds without {spare['layers'][0]}: "
        "take them out of the group"
    )
    assert "holds with 1 pin (2 layers) in FP16" in result.verdict


def test_a_format_in_blocks_is_not_judged_by_one_step(tmp_path: Path) -> None:
    result = workplace(tmp_path).pin(target="sqnr_db>=18", format="nvfp4")
    assert result.report is not None
    pins = pins_of(result.report)
    assert pins
    assert {str(pin.evidence["why"]) for pin in pins} == {
        "what it reads was not judged: NVFP4 has a scale for each block"
    }


@pytest.mark.parametrize(("fault", "family"), [("ffn-down-outlier", "bert"), ("qk-overflow", "bert")])
def test_everything_in_fp16_and_in_bf16_are_points_whatever_the_search_began_with(
    fault: str, family: str, tmp_path: Path
) -> None:
    report = workplace(tmp_path, fault, family).pin().report
    assert report is not None
    assert report.search is not None
    labels = [point.label for point in report.search.points]
    for fmt in ("FP16", "BF16"):
        assert sum(label.startswith(f"everything in {fmt}") for label in labels) == 1
    assert [point.kind for point in report.search.points].count("chosen") == 1


def test_a_group_that_must_move_together_says_why(tmp_path: Path) -> None:
    result = workplace(tmp_path, "norm-square-overflow", "gpt2").pin()
    assert result.report is not None
    norms = [pin for pin in pins_of(result.report) if len(pin.layers) > 1]
    assert norms
    assert all("TensorRT fuses them into one kernel" in str(pin.evidence["together"]) for pin in norms)
