"""Planted faults are found where they were planted, and mended; healthy graphs are left in peace."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from diag.plan.schema import read_plan
from fixtures.graphs import GRAPHS
from fixtures.graphs.faults import FAULTS, mask_constant
from fixtures.graphs.recipes import RECIPES

TRANSFORMERS = ("bert", "gpt2", "llama", "vit", "conformer")
FOUND_AT = (
    *(("norm-square-overflow", family) for family in TRANSFORMERS),
    *(("qk-overflow", family) for family in TRANSFORMERS),
    *(("ffn-down-outlier", family) for family in TRANSFORMERS),
    ("swiglu-overflow", "llama"),
    ("value-outlier", "bert"),
)
"""Faults whose culprit is the layer in which the error is born."""

SAFE_DB = {"fp16": 50.0, "bf16": 30.0, "int8": 25.0}
"""What healthy graphs reach in a format."""


def plant(fault, family):
    return FAULTS[fault](GRAPHS[family]())


@pytest.mark.parametrize(("fault", "family"), FOUND_AT)
def test_the_error_is_born_at_the_culprit_and_mended_there(compared, tmp_path, fault, family):
    planted = plant(fault, family)
    report = compared(planted.fixture, planted.format, 2)
    assert report.outputs[0].metrics["sqnr_db"] < 15
    assert report.births[0].layer == planted.culprit
    assert any(birth.reaches_output for birth in report.births)
    kind = planted.kind if planted.format == "fp16" else "sensitive-op"
    finding = next(f for f in report.findings if f.kind == kind)
    assert finding.layers[0] == planted.culprit
    assert finding.responsible is None
    mend = tmp_path / "out" / "mend.yaml"
    assert [pin.match for pin in read_plan(mend).pins]
    again = compared(planted.fixture, None, 2, plan=str(mend), out=str(tmp_path / "mended"))
    assert again.outputs[0].metrics["sqnr_db"] > SAFE_DB[planted.format]
    assert not any(birth.reaches_output for birth in again.births)
    assert any(pin.layers > 0 for pin in again.plan.pins)


def test_the_mend_names_the_line_that_measures_it(compared, trtdiag_words, tmp_path):
    planted = plant("swiglu-overflow", "llama")
    report = compared(planted.fixture, "fp16", 2)
    words = trtdiag_words(report.findings[0].mend.command)
    assert words["--plan"] == str(tmp_path / "out" / "mend.yaml")
    assert words["--data"].endswith("llama-data")


@pytest.fixture
def trtdiag_words():
    """Options of a command line, by name."""

    def read(line: str) -> dict[str, str]:
        words = shlex.split(line)
        assert words[:2] == ["trtdiag", "compare"]
        return dict(zip(words[3::2], words[4::2], strict=True))

    return read


def test_an_earlier_mend_does_not_outlive_its_report(compared, tmp_path):
    compared(plant("swiglu-overflow", "llama").fixture, "fp16", 2)
    assert (tmp_path / "out" / "mend.yaml").is_file()
    compared(GRAPHS["llama"](), "fp16", 2)
    assert not (tmp_path / "out" / "mend.yaml").exists()


def test_eps_that_vanishes_is_mended_where_it_divides(compared, tmp_path):
    """1 / sqrt(1e-12) is 1e6: beyond FP16 with the constant, and infinite without it."""
    planted = plant("tiny-eps", "llama")
    report = compared(planted.fixture, "fp16", 2)
    (born,) = report.births
    assert planted.fixture.node(born.layer).op_type == "Reciprocal"
    assert born.layer in report.findings[0].layers
    mend = str(tmp_path / "out" / "mend.yaml")
    mended = compared(planted.fixture, None, 2, plan=mend, out=str(tmp_path / "mended"))
    assert mended.outputs[0].metrics["sqnr_db"] > 50


PLAN = "schema: trtdiag.plan/1\ndefault: fp16\nconstants: {{out_of_range: {}}}\n"


@pytest.mark.parametrize(("policy", "breaks"), [("inf", True), ("clamp", False)])
def test_a_mask_beyond_the_format(compared, tmp_path, policy, breaks):
    """-3.4e38 becomes infinite, and 0 * -inf is NaN; held at -65504 it masks as well as ever."""
    planted = mask_constant(GRAPHS["bert"]())
    (tmp_path / "plan.yaml").write_text(PLAN.format(policy))
    report = compared(planted.fixture, None, 2, plan=str(tmp_path / "plan.yaml"))
    assert report.run.reference.trusted
    assert report.run.flags["constants out of range"] == policy
    if breaks:
        assert report.births[0].layer == planted.culprit
        assert report.findings[0].kind == planted.kind
        assert planted.culprit in report.findings[0].layers
    else:
        assert report.outputs[0].metrics["sqnr_db"] > 50
        assert not [f for f in report.findings if f.severity == "error"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("policy", ["inf", "clamp"])
def test_a_mask_that_is_chosen_does_no_harm(compared, tmp_path, family, policy):
    planted = mask_constant(GRAPHS[family]())
    (tmp_path / "plan.yaml").write_text(PLAN.format(policy))
    report = compared(planted.fixture, None, 2, plan=str(tmp_path / "plan.yaml"))
    assert report.outputs[0].metrics["sqnr_db"] > 50
    assert not any(birth.reaches_output for birth in report.births)
    assert not [f for f in report.findings if f.severity == "error"]


# Negative controls.


@pytest.mark.parametrize("fmt", SAFE_DB)
@pytest.mark.parametrize("family", GRAPHS)
def test_a_healthy_graph_is_left_in_peace(compared, tmp_path, family, fmt):
    report = compared(GRAPHS[family](), fmt, 2)
    assert all(output.metrics["sqnr_db"] > SAFE_DB[fmt] for output in report.outputs)
    assert report.births == []
    assert report.findings == []
    assert "begins at" not in report.verdict
    assert not (tmp_path / "out" / "mend.yaml").exists()


CONTROLS = [name for name, make in RECIPES.items() if make().is_control]
UNSEEN = {
    "R3c": "its squares underflow: a birth at the culprit, and no value is lost",
    "R9c": "hangs on an FP16 accumulator, and the emulation accumulates in FP32",
    "R9d": "hangs on an FP16 accumulator, and the emulation accumulates in FP32",
}
CULPRITS = [name for name in RECIPES if name not in CONTROLS and name not in UNSEEN]


def recipe_report(compared, tmp_path, name):
    """Constants beyond FP16 become infinite, as the catalogue's figures have it."""
    recipe = RECIPES[name]()
    (tmp_path / "plan.yaml").write_text(PLAN.format("inf"))
    fixture = SimpleNamespace(name="recipe", model=recipe.model)
    return recipe, compared(fixture, None, [recipe.feeds], plan=str(tmp_path / "plan.yaml"))


@pytest.mark.parametrize("name", CONTROLS)
def test_recipes_that_are_controls_lose_no_value(compared, tmp_path, name):
    _, report = recipe_report(compared, tmp_path, name)
    assert not [f for f in report.findings if f.severity == "error"]
    assert report.outputs[0].metrics["nonfinite"] == report.outputs[0].metrics["zero_collapsed_rows"] == 0


@pytest.mark.parametrize("name", CULPRITS)
def test_recipes_are_blamed_on_their_culprit(compared, tmp_path, name):
    recipe, report = recipe_report(compared, tmp_path, name)
    blamed = [f for f in report.findings if f.severity == "error" and f.layers]
    assert recipe.culprit in blamed[0].layers
    assert blamed[0].kind == recipe.kind
    assert report.births[0].layer in blamed[0].layers


def test_underflowing_squares_are_born_at_the_square(compared, tmp_path):
    recipe, report = recipe_report(compared, tmp_path, "R3c")
    assert report.births[0].layer == recipe.culprit
    assert report.findings[0].layers[0] == recipe.culprit
