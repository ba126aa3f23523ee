"""Hazards of formats: the fault catalogue through `check`, and each rule beside its negative control."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from foreign_models import build
from onnx import TensorProto, helper

from diag.pipeline.check.job import CheckSettings, check
from diag.progress import Silent
from fixtures.graphs.recipes import RECIPES

F = np.float32

# What the rules say without data and with them: the kind's initial severity, notes with a leading "n".
CATALOGUE = {
    "R1": ("note", "error"),
    "R1-axis1": ("note", "error"),
    "R2": ("note", "error"),
    "R3a": ("note", "error"),
    "R3b": ("warning", "error"),
    "R3c": ("note", "warning"),
    "R4": ("warning", "error"),
    "R5a": ("warning", "warning"),
    "R5a-1e9": ("warning", "warning"),
    "R5b": ("warning", "warning"),
    "R5d": (None, "error"),
    "R8a": ("note", "error"),
    "R8d": ("note", "error"),
    "R8e": ("note", "error"),
    "R9a": ("error", "error"),
    "R10": (None, "error"),
    "R63": (None, "error"),
}

WRONG = ("error", "warning")


def checked(folder, model, feeds=None, fmt="fp16", policy="clamp"):
    """Findings of the check of a model; with data when there are feeds."""
    folder.mkdir(parents=True, exist_ok=True)
    path = model
    if isinstance(model, onnx.ModelProto):
        path = folder / "model.onnx"
        onnx.save(model, path)
    data = None
    if feeds is not None:
        data = str(folder / "data.npz")
        np.savez(data, **feeds)
    plan = folder / "given.yaml"
    plan.write_text(f"schema: trtdiag.plan/1\ndefault: {fmt}\nconstants: {{out_of_range: {policy}}}\n")
    return check(CheckSettings(str(path), str(folder / "o"), str(plan), None, data), Silent()).findings


def severity_of(findings, kind):
    found = [finding.severity for finding in findings if finding.kind == kind]
    return min(found, key=("error", "warning", "note").index) if found else None


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue(tmp_path, name):
    recipe = RECIPES[name]()
    static = checked(tmp_path / "s", recipe.model)
    measured = checked(tmp_path / "m", recipe.model, recipe.feeds)
    assert (severity_of(static, recipe.kind), severity_of(measured, recipe.kind)) == CATALOGUE[name]
    blamed = [name for finding in measured if finding.kind == recipe.kind for name in finding.layers]
    if name != "R5d":  # there it is the input's
        assert recipe.culprit in blamed


CONTROLS = [name for name, make in RECIPES.items() if make().is_control]


@pytest.mark.parametrize("name", CONTROLS)
def test_the_catalogues_controls(tmp_path, name):
    recipe = RECIPES[name]()
    found = checked(tmp_path, recipe.model, recipe.feeds)
    assert not [f for f in found if f.severity == "error"]
    near = {"norm-square-overflow"} if name == "R1-control" else set()  # 200 squared is within 2 of the end
    assert {f.kind for f in found if f.severity == "warning"} == near


def test_there_are_controls():
    assert len(CONTROLS) >= 8


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["R1", "R2", "R4", "R10", "R63", "R8a"])
def test_wider_formats_are_clean(tmp_path, name, fmt):
    recipe = RECIPES[name]()
    assert not checked(tmp_path, recipe.model, recipe.feeds, fmt)


def test_bf16_rounds_the_lowest_float_to_infinity(tmp_path):
    assert severity_of(checked(tmp_path, RECIPES["R5a"]().model, fmt="bf16"), "mask-constant") == "warning"
    assert not checked(tmp_path, RECIPES["R5a-1e9"]().model, fmt="bf16")


def test_a_mask_that_becomes_infinite_is_an_error(tmp_path):
    found = checked(tmp_path, RECIPES["R5a"]().model, policy="inf")
    assert severity_of(found, "mask-constant") == "error"


def one_op(path, op, *constants, shape=(2, 4), **attributes):
    """x through one operator with constants, then Relu."""
    names = [f"c{i}" for i in range(len(constants))]
    nodes = [
        helper.make_node(op, ["x", *names], ["h"], "it", **attributes),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    values = {name: np.asarray(value, F) for name, value in zip(names, constants, strict=True)}
    return build(path, nodes, values, list(shape))


@pytest.mark.parametrize(
    ("value", "found"), [(-3.0e4, None), (-64400.0, None), (-65000.0, "warning"), (-1e5, "warning")]
)
def test_masks_near_the_end(tmp_path, value, found):
    nodes = [
        helper.make_node("Add", ["x", "m"], ["h"], "mask"),
        helper.make_node("Softmax", ["h"], ["y"], "soft"),
    ]
    path = build(tmp_path / "m.onnx", nodes, {"m": np.full((1, 4), value, F)}, [2, 4])
    findings = checked(tmp_path, path)
    assert severity_of(findings, "mask-constant") == found
    assert all(f.layers == ["mask"] for f in findings)


def test_infinite_masks_are_the_models_own(tmp_path):
    nodes = [
        helper.make_node("Add", ["x", "m"], ["h"], "mask"),
        helper.make_node("Softmax", ["h"], ["y"], "soft"),
    ]
    path = build(tmp_path / "m.onnx", nodes, {"m": np.array([[0, 0, -np.inf, 0]], F)}, [2, 4])
    assert not checked(tmp_path, path, {"x": np.ones((2, 4), F)})


@pytest.mark.parametrize(
    ("op", "constants", "found"),
    [
        ("Mul", [1e5], "error"),
        ("Mul", [6e4], None),
        ("Clip", [0.0, 3.4e38], None),  # a bound that nothing reaches
        ("Clip", [-3.4e38, 0.0], None),
        ("Clip", [1e5, 3.4e38], "error"),
        ("Max", [-3.4e38], None),
        ("Min", [3.4e38], None),
        ("Min", [-1e5], "error"),
    ],
)
def test_constants_beyond_the_range(tmp_path, op, constants, found):
    findings = checked(tmp_path, one_op(tmp_path / "m.onnx", op, *constants))
    assert severity_of(findings, "weight-conversion") == found


def tiny_weights(share, size):
    """Normal numbers, of which a share is as small as `size`."""
    random = np.random.default_rng(0)
    values = random.normal(size=(4, 256))
    small = random.uniform(size=values.shape) < share
    return np.where(small, random.choice([-1, 1], size=values.shape) * size, values).astype(F)


@pytest.mark.parametrize(
    ("weight", "fmt", "found"),
    [
        (tiny_weights(1, 1e-8), "fp16", "error"),  # all of them vanish
        (tiny_weights(1, 1e-8), "bf16", None),
        (tiny_weights(0.3, 1e-6), "fp16", None),  # subnormal, and no energy in them
        (tiny_weights(0.0, 0), "bf16", None),  # rounding alone loses 2^-18 of the energy
    ],
)
def test_weights_that_vanish(tmp_path, weight, fmt, found):
    findings = checked(tmp_path, one_op(tmp_path / "m.onnx", "MatMul", weight), fmt=fmt)
    assert severity_of(findings, "weight-conversion") == found


def test_quantized_weights_with_a_few_large_elements(tmp_path):
    """SQNR = 52.9 - 20 log10(crest), crest = 200 / sqrt(1 + 200^2 / 2048): one element 200 times the rest."""
    weight = np.random.default_rng(0).normal(size=(2048, 8)).astype(F)
    plain = one_op(tmp_path / "plain.onnx", "MatMul", weight, shape=(2, 2048))
    assert not checked(tmp_path / "p", plain, fmt="int8")
    weight[5] = 200.0
    (found,) = checked(
        tmp_path / "o", one_op(tmp_path / "out.onnx", "MatMul", weight, shape=(2, 2048)), fmt="int8"
    )
    assert (found.kind, found.severity, found.layers) == ("shared-range", "warning", ["it"])
    crest = 200 / np.sqrt(1 + 200**2 / 2048)
    assert found.evidence["worst_sqnr_db"] == pytest.approx(52.9 - 20 * np.log10(crest), abs=1.0)


@pytest.mark.parametrize(("largest", "found"), [(3e4, None), (4e4, "warning"), (7e4, "error")])
def test_headroom(tmp_path, largest, found):
    """Half of 65504 is the bound of a warning."""
    path = one_op(tmp_path / "m.onnx", "Mul", 2.0)
    findings = checked(tmp_path, path, {"x": np.full((2, 4), largest / 2, F)})
    assert severity_of(findings, "activation-overflow") == found
    assert all(f.layers[0] == "it" for f in findings)
    assert all(f.evidence["headroom"] == pytest.approx(65504 / largest, rel=1e-5) for f in findings)


def test_an_input_beyond_the_range(tmp_path):
    path = one_op(tmp_path / "m.onnx", "Mul", 1e-3)
    (found,) = checked(tmp_path / "a", path, {"x": np.full((2, 4), 1e5, F)})
    assert (found.kind, found.severity, found.layers) == ("activation-overflow", "error", ["x"])
    assert not checked(tmp_path / "b", path, {"x": np.full((2, 4), 1e4, F)})


@pytest.mark.parametrize(
    ("fmt", "angle", "found"),
    [("fp16", 15.0, None), ("fp16", 25.0, "warning"), ("bf16", 2.0, None), ("bf16", 3.0, "warning")],
)
def test_angles(tmp_path, fmt, angle, found):
    """0.01 rad over the unit roundoffs 2^-11 and 2^-8: 20.5 and 2.56."""
    path = one_op(tmp_path / "m.onnx", "Sin")
    findings = checked(tmp_path, path, {"x": np.full((2, 4), angle, F)}, fmt)
    assert severity_of(findings, "position-precision") == found


def test_a_reference_that_is_not_a_number(tmp_path):
    path = one_op(tmp_path / "m.onnx", "Sqrt")
    findings = checked(tmp_path / "bad", path, {"x": np.full((2, 4), -1.0, F)})
    assert [f.kind for f in findings] == ["reference-trust"]
    assert not checked(tmp_path / "good", path, {"x": np.ones((2, 4), F)})


def test_integer_constants_are_no_hazard(tmp_path):
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], "cast", to=TensorProto.INT64),
        helper.make_node("Mul", ["i", "big"], ["b"], "mul"),
        helper.make_node("Cast", ["b"], ["y"], "back", to=TensorProto.FLOAT),
    ]
    assert not checked(tmp_path, build(tmp_path / "m.onnx", nodes, {"big": np.int64(10**6)}, [2, 4]))


@pytest.mark.parametrize(("largest", "found"), [(40.0, None), (100.0, "warning")])
def test_quantized_activations_with_a_large_element(tmp_path, largest, found):
    """4,095 elements of magnitude 1 and one large: crest 33.9 and 53.9, SQNR 52.9 - 20 log10(crest)."""
    x = np.where(np.arange(4096).reshape(64, 64) % 2, F(1), F(-1))
    x[3, 5] = largest
    path = one_op(tmp_path / "m.onnx", "MatMul", np.eye(64), shape=(64, 64))
    findings = checked(tmp_path / "int8", path, {"x": x}, "int8")
    assert severity_of(findings, "shared-range") == found
    for finding in findings:
        crest = largest / np.sqrt((4095 + largest**2) / 4096)
        assert finding.layers == ["it"]
        assert finding.evidence["worst_sqnr_db"] == pytest.approx(52.87 - 20 * np.log10(crest), abs=0.01)
    assert not checked(tmp_path / "fp8", path, {"x": x}, "fp8")  # a float's step follows its value
