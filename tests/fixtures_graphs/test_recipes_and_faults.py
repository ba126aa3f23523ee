"""Planted faults and recipes do what they claim: FP32 is sane, the format breaks, the culprit's pin cures."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import small_emulator as emulator

from fixtures.graphs import GRAPHS, bert, conformer, gpt2, llama, vit
from fixtures.graphs.faults import (
    FAULTS,
    ffn_down_outlier,
    mask_constant,
    norm_square_overflow,
    value_outlier,
)
from fixtures.graphs.recipes import RECIPES

ERRORS = {
    # The catalogue's measured relative errors over finite elements, and counts of non-finite outputs.
    "R1": (1.0, 0),
    "R1-axis1": (1.0, 0),
    "R1-control": (2.6e-4, 0),
    "R1-fused": (2.3e-4, 0),
    "R2": (1.0, 0),
    "R3a": (1.0, 0),
    "R3b": (None, 256),
    "R3c": (0.51, 0),
    "R3-control": (4e-4, 0),
    "R4": (None, 768),
    "R4-control": (4e-4, 0),
    "R5a": (None, 512),
    "R5a-1e9": (None, 512),
    "R5a-control": (4e-4, 0),
    "R5b": (None, 32),
    "R5d": (None, 32),
    "R8a": (None, 18),
    "R8b": (1e-4, 0),
    "R8c": (2e-4, 0),
    "R8d": (None, 1),
    "R8e": (None, 1),
    "R9a": (None, 1),
    "R9b": (None, 0),
    "R10": (None, 256),
    "R63": (None, 4096),
    "R63-control": (None, 0),
}

TRANSFORMERS = ("bert", "gpt2", "llama", "vit", "conformer")
PLACES = {
    "norm-square-overflow": TRANSFORMERS,
    "swiglu-overflow": ("llama",),
    "qk-overflow": TRANSFORMERS,
    "mask-constant": ("bert", "gpt2", "llama"),
    "tiny-eps": ("llama",),
    "ffn-down-outlier": TRANSFORMERS,
    "value-outlier": ("bert",),
}
"""The families that each fault can be planted in."""


def reference(model, feeds):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def output_of(model, name):
    return next(node.output[0] for node in model.graph.node if node.name == name)


def contractions(model):
    return {node.name for node in model.graph.node if node.op_type in emulator.CONTRACTIONS}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_in_fp32(name):
    recipe = RECIPES[name]()
    onnx.checker.check_model(recipe.model, full_check=True)
    assert recipe.id == name
    assert np.isfinite(reference(recipe.model, recipe.feeds)).all()
    assert recipe.is_control == (recipe.kind == "")
    if not recipe.is_control:
        output_of(recipe.model, recipe.culprit)


@pytest.mark.parametrize("name", ERRORS)
def test_recipe_fails_in_fp16_as_measured(name):
    recipe = RECIPES[name]()
    expected = reference(recipe.model, recipe.feeds)
    got = emulator.run_fp16(recipe.model, recipe.feeds)["y"]
    error, non_finite = ERRORS[name]
    assert np.count_nonzero(~np.isfinite(got)) == non_finite
    if error is not None:
        relative = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert relative == pytest.approx(error, rel=0.25)


def test_r5e_gives_no_nan():
    recipe = RECIPES["R5e"]()
    assert np.isfinite(emulator.run_fp16(recipe.model, recipe.feeds)["y"]).all()


def test_r9_hangs_on_the_accumulator():
    values = RECIPES["R9c"]().feeds["x"].astype(np.float16).reshape(-1)
    running = np.float16(0)
    for value in values[:20000]:
        running = np.float16(running + value)
    assert running == 2048  # and stays there: half of 2048's spacing is 1
    assert float(values.astype(np.float64).sum()) > 65504  # pairwise sums end out of range


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused_where_it_has_no_place(fault):
    for family in GRAPHS.keys() - set(PLACES[fault]):
        with pytest.raises(ValueError, match=family):
            FAULTS[fault](GRAPHS[family]())


@pytest.mark.parametrize(
    ("fault", "family"), [(fault, name) for fault, names in PLACES.items() for name in names]
)
def test_fault_leaves_fp32_sane(fault, family):
    clean = GRAPHS[family]()
    planted = FAULTS[fault](clean)
    fixture = planted.fixture
    onnx.checker.check_model(fixture.model, full_check=True)
    first = reference(fixture.model, fixture.batch(2, 0))
    assert np.isfinite(first).all()
    assert np.abs(first - reference(fixture.model, fixture.batch(2, 1))).mean() > 0.3 * first.std()
    assert planted.culprit in {node.name for node in fixture.model.graph.node}
    assert fixture.truth == clean.truth
    assert clean.model.SerializeToString() == GRAPHS[family]().model.SerializeToString()


@pytest.mark.parametrize(
    ("fault", "make"),
    [
        *(("norm-square-overflow", make) for make in (bert, gpt2, llama, vit, conformer)),
        *(("qk-overflow", make) for make in (bert, gpt2, llama, vit, conformer)),
        ("swiglu-overflow", llama),
        ("mask-constant", bert),
        ("tiny-eps", llama),
    ],
)
def test_fp16_breaks_at_the_culprit(fault, make):
    clean = make()
    healthy = emulator.run_fp16(clean.model, clean.batch())[clean.model.graph.output[0].name]
    assert emulator.sqnr_db(reference(clean.model, clean.batch()), healthy) > 50
    planted = FAULTS[fault](clean)
    model, feeds = planted.fixture.model, planted.fixture.batch()
    values = emulator.run_fp16(model, feeds)
    output = values[model.graph.output[0].name]
    assert not np.isfinite(output).all() or emulator.sqnr_db(reference(model, feeds), output) < 3
    if fault == "tiny-eps":
        assert np.count_nonzero(values[output_of(model, planted.culprit)] == 0)
        return
    assert not np.isfinite(values[output_of(model, planted.culprit)]).all()
    before = model.graph.node[: [n.name for n in model.graph.node].index(planted.culprit)]
    made = [values[name] for node in before for name in node.output]
    assert all(np.isfinite(value).all() for value in made if value.dtype == np.float32)


def test_norm_overflow_is_cured_by_its_square():
    planted = norm_square_overflow(bert())
    model, feeds = planted.fixture.model, planted.fixture.batch()
    output = emulator.run_fp16(model, feeds, {planted.culprit})[model.graph.output[0].name]
    assert emulator.sqnr_db(reference(model, feeds), output) > 30


def test_where_mask_is_harmless_without_a_whole_masked_row():
    planted = mask_constant(gpt2())
    model, feeds = planted.fixture.model, planted.fixture.batch()
    assert not planted.harmful
    output = emulator.run_fp16(model, feeds)[model.graph.output[0].name]
    assert emulator.sqnr_db(reference(model, feeds), output) > 50


@pytest.mark.parametrize(
    ("fault", "make"),
    [(ffn_down_outlier, m) for m in (bert, gpt2, llama, conformer)] + [(value_outlier, bert)],
)
def test_int8_breaks_at_the_culprit_alone(fault, make):
    planted = fault(make())
    model, feeds = planted.fixture.model, planted.fixture.batch()
    expected, out = reference(model, feeds), model.graph.output[0].name
    everything = contractions(model)

    def quantized(only):
        return emulator.sqnr_db(expected, emulator.run_int8(model, feeds, only)[out])

    assert quantized(everything) < 13
    assert quantized(everything - {planted.culprit}) > 28
    assert quantized({planted.culprit}) < 15
