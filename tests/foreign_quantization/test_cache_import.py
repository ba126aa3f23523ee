"""What an imported cache covers, what is doubtful in it, and what is refused in one sentence."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

GOOD = (("x", 2 / 127), ("h", 0.05), ("p", 1 / 128), ("y", 0.01))


def imported(trtdiag, model, file, tmp_path, *more):
    ended = trtdiag("calibrate", model, "--import", file, "--out", tmp_path / "t.json", "--json", *more)
    assert ended.code == 0, ended.err
    return ended.json, {finding["id"]: finding for finding in ended.json["findings"]}


def test_a_sound_cache_says_nothing(trtdiag, model, cache, data, tmp_path):
    said, found = imported(trtdiag, model, cache(*GOOD), tmp_path, "--data", data)
    assert found == {}
    assert (said["covered"], said["needed"], said["tensors"]) == (2, 2, 4)
    assert said["ratios"]["x"] == pytest.approx(1, rel=1e-6)
    assert said["compared_with"] == "minmax"


def test_names_by_what_they_are(trtdiag, model, cache, tmp_path):
    made = ("(Unnamed Layer* 7) [Constant]_output", 0.1), ("ONNXTRT_Broadcast_3_output", 0.1)
    file = cache(*GOOD, ("w", 0.1), ("v_output", 0.1), ("soft_output", 0.2), ("gone: it", 0.3), *made)
    said, found = imported(trtdiag, model, file, tmp_path)
    assert said["constants"] == ["w", "v_output"]
    assert said["inside_layers"] == ["soft_output"]
    assert said["unmatched"] == ["gone: it"]
    assert said["made_by_tensorrt"] == 2
    assert found["cache-constants"]["severity"] == "note"
    assert found["cache-unmatched"]["evidence"]["first"] == "gone: it"


@pytest.mark.parametrize(
    ("digits", "finding"),
    [
        ("3c010204", "cache-placeholder-0.00787"),
        ("7f800000", "cache-infinite"),
        ("00000001", "cache-denormal"),
    ],
)
def test_scales_that_nobody_measured(trtdiag, model, cache, tmp_path, digits, finding):
    _, found = imported(trtdiag, model, cache(*GOOD[:3], ("y", digits)), tmp_path)
    assert list(found) == [finding]
    assert found[finding]["evidence"]["first"] == "y"


def test_scales_that_are_all_the_same(trtdiag, model, cache, tmp_path):
    _, found = imported(trtdiag, model, cache(*((name, 0.03) for name, _ in GOOD)), tmp_path)
    assert found["cache-all-equal"]["severity"] == "error"


@pytest.mark.parametrize(
    ("factor", "severity"),
    [(1.9, ""), (2.1, "warning"), (1 / 2.1, "warning"), (4.1, "error"), (0.2, "error")],
)
def test_scales_beside_fresh_data(trtdiag, model, cache, data, tmp_path, factor, severity):
    """The largest magnitude of x is 2, so its min-max scale is 2/127."""
    file = cache(("x", factor * 2 / 127), *GOOD[1:])
    said, found = imported(trtdiag, model, file, tmp_path, "--data", data)
    assert said["ratios"]["x"] == pytest.approx(factor, rel=1e-6)
    stale = {key: value for key, value in found.items() if "stale" in key}
    assert [value["severity"] for value in stale.values()] == ([severity] if severity else [])
    assert all(value["evidence"]["first"] == "x" for value in stale.values())


def test_what_an_imported_range_cuts_off(trtdiag, model, cache, data, tmp_path):
    """The energy beyond 1, counted on the values themselves, over the energy of all."""
    imported(trtdiag, model, cache(("x", 1 / 127), *GOOD[1:]), tmp_path, "--data", data)
    table = json.loads((tmp_path / "t.json").read_text())
    values = np.concatenate([np.load(file)["x"] for file in sorted(data.iterdir())]).astype(np.float64)
    cut = np.sum(np.maximum(np.abs(values) - 1, 0) ** 2) / np.sum(values**2)
    cost = table["tensors"]["x"]["methods"]["imported"]
    assert cost["clipped_energy_ratio"] == pytest.approx(cut, rel=0.01)
    assert table["tensors"]["x"]["methods"]["minmax"]["absmax"] == 2
    assert table["method"] == "imported"


def test_the_scales_of_a_cache_are_in_the_typed_model(trtdiag, model, cache, tmp_path):
    typed = tmp_path / "typed.onnx"
    ended = trtdiag("convert", model, "--format", "int8", "--calibration", cache(*GOOD), "--out", typed)
    assert ended.code == 0, ended.err
    graph = onnx.load(typed).graph
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    found = {n.input[0]: constants[n.input[1]] for n in graph.node if n.op_type == "QuantizeLinear"}
    assert found == {"x": np.float32(2 / 127), "p": np.float32(1 / 128)}


def test_compare_takes_a_cache_and_names_it(trtdiag, model, cache, data, tmp_path):
    words = ("--format", "int8", "--data", data, "--calibration", cache(*GOOD), "--out", tmp_path / "o")
    ended = trtdiag("compare", model, *words, "--json")
    assert ended.code == 0, ended.err
    assert "TensorRT cache given.cache (8.6.1, MinMaxCalibration)" in ended.json["run"]["calibration"]


@pytest.mark.parametrize("job", ["import", "convert"])
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((("a", 0.1), ("b", 0.2)), "is another model's: 0 of 2 tensors"),
        ((("x", 0.1), ("p", 0.1), ("a", 0.1), ("b", 0.2), ("c", 0.1)), "another model's"),
        ((("x", 0.0), *GOOD[1:]), "a scale that is zero, negative or NaN, the first 'x' (0)"),
        ((("x", -1.0), *GOOD[1:]), "the first 'x' (-1)"),
        ((*GOOD[:3], ("y", "7fc00000")), "the first 'y' (nan)"),
    ],
)
def test_caches_that_are_refused(trtdiag, model, cache, tmp_path, job, entries, said):
    file, out = cache(*entries), tmp_path / "out"
    if job == "import":
        ended = trtdiag("calibrate", model, "--import", file, "--out", out)
    else:
        ended = trtdiag("convert", model, "--format", "int8", "--calibration", file, "--out", out)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert not out.exists()


def test_a_needed_scale_that_is_infinite(trtdiag, model, cache, tmp_path):
    words = ("--calibration", cache(("x", "7f800000"), *GOOD[1:]), "--out", tmp_path / "o")
    ended = trtdiag("convert", model, "--format", "int8", *words)
    assert ended.code == 2
    assert "lacks 1 of 2 tensors, or gives them no finite scale, first 'x'" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("m.onnx", "--import", "c", "--export"), "three different jobs"),
        (("m.onnx", "--import", "c", "--method", "mse"), "brings its scales"),
        (("m.onnx", "--import", "gone"), "cannot be read"),
        (("t.json", "--export", "--data", "d"), "reads no data"),
        (("t.json", "--export", "--jobs", "2"), "Leave out --data, --plan, --limit, --jobs"),
        (("t.json", "--export", "--method", "average"), "no method 'average'"),
        (("m.onnx", "--import", "c", "--all-tensors"), "Leave out --all-tensors"),
        (("m.onnx", "--import", "c", "--limit", "2"), "measures nothing"),
        (("m.onnx", "--import", "c", "--skip-bad"), "measures nothing"),
        (("m.onnx", "--data", "d", "--tensorrt-version", "10.6.0"), "with --export"),
        (("m.onnx", "--data", "d", "--all-tensors", "--method", "best"), "operands only"),
    ],
)
def test_words_that_contradict_each_other(trtdiag, model, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    model.rename(tmp_path / "m.onnx")
    ended = trtdiag("calibrate", *words, "--out", "o")
    assert ended.code == 2
    assert said in ended.err


def test_a_measured_table_needs_a_version(trtdiag, model, data, tmp_path):
    trtdiag("calibrate", model, "--data", data, "--out", tmp_path / "t.json")
    ended = trtdiag("calibrate", tmp_path / "t.json", "--export", "--out", tmp_path / "c")
    assert ended.code == 2
    assert "--tensorrt-version 10.6.0 for example" in ended.err


@pytest.mark.parametrize("version", ["banana", "10.x", "", "10.6.0rc1"])
def test_what_is_no_version(trtdiag, model, data, tmp_path, version):
    trtdiag("calibrate", model, "--data", data, "--out", tmp_path / "t.json")
    words = ("--out", tmp_path / "c", "--tensorrt-version", version)
    ended = trtdiag("calibrate", tmp_path / "t.json", "--export", *words)
    assert (ended.code, ended.out) == (2, "")
    assert f"{version!r} is no version of TensorRT. Write it as 10.6.0." in ended.err
    assert not (tmp_path / "c").exists()


def test_an_import_that_measures_in_no_process(trtdiag, model, cache, data, tmp_path):
    words = ("--data", data, "--jobs", "0", "--out", tmp_path / "o")
    ended = trtdiag("calibrate", model, "--import", cache(*GOOD), *words)
    assert ended.code == 2
    assert "0 processes" in ended.err


def test_imported_ranges_answer_for_no_method(trtdiag, model, cache, tmp_path):
    imported(trtdiag, model, cache(*GOOD), tmp_path)
    for method in ("minmax", "entropy"):
        plan = tmp_path / "plan.yaml"
        plan.write_text(f"schema: trtdiag.plan/1\ndefault: int8\nquantizer: {{method: {method}}}\n")
        words = ("--plan", plan, "--calibration", tmp_path / "t.json", "--out", tmp_path / "o")
        ended = trtdiag("convert", model, *words)
        assert ended.code == 2
        assert f"no {method} range of tensor 'x'" in ended.err
        assert "were imported" in ended.err
