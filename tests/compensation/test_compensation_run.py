"""The job as a whole: planted faults mended, good models left alone, each step credited and proven."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compensation_graphs import (
    HIDDEN,
    WIDTH,
    Graph,
    data,
    gemm_model,
    norm_model,
    outlier_gamma,
    outputs_of,
    swiglu_model,
    uniform,
)
from ended import Ended

from diag.calibration.table import CalibrationTable, read_table
from diag.compensation import run as steps_of
from diag.compensation.draft import Draft
from diag.compensation.edit import Rewrite
from diag.compensation.proposals import Proposal, Workplace
from diag.compensation.run import Compensated
from diag.errors import NotEnoughEvidenceError, UsageError
from diag.model.load import load_model
from diag.pipeline.calibrate.compensate import CompensateSettings, compensate_model
from diag.progress import Silent


def compensated(
    model: str, folder: Path, *steps: str, fmt: str = "int8", batches: int = 6
) -> tuple[CalibrationTable, Compensated, CompensateSettings]:
    chosen = steps or tuple(steps_of.STEPS)
    settings = CompensateSettings(
        model,
        data(folder / "data", batches),
        str(folder / "table.json"),
        str(folder / "better.onnx"),
        steps=chosen,
        format=fmt,
    )
    return *compensate_model(settings, Silent()), settings


def planted_norm(folder: Path, size: float) -> str:
    """A good norm and projections, one channel's scale moved out of the weights into gamma."""
    model = load_model(norm_model(folder, outlier_gamma(size)))
    rewrite = Rewrite(model)
    for layer in ("q", "k"):
        weight = rewrite.constant(layer, 1).copy()
        weight[3] /= size
        rewrite.put(layer, 1, weight)
    path = folder / "planted.onnx"
    from diag.model.save import save_model

    made = rewrite.finish()
    save_model(made.proto, made.weights, path)
    return str(path)


def sqnr(found: Compensated, before: bool) -> float:
    metrics = (found.before if before else found.after).metrics
    return min(m["sqnr_db"] for m in metrics.values())


def test_smoothing_mends_a_planted_channel(tmp_path: Path) -> None:
    for name in ("clean", "planted"):
        (tmp_path / name).mkdir()
    _, clean, _ = compensated(norm_model(tmp_path / "clean", outlier_gamma(1)), tmp_path / "clean", "smooth")
    table, found, settings = compensated(
        planted_norm(tmp_path / "planted", 128), tmp_path / "planted", "smooth"
    )
    assert sqnr(found, before=True) < sqnr(clean, before=True) - 20
    assert sqnr(found, before=False) > sqnr(clean, before=True) - 1
    assert table.compensation is not None
    assert [c.kept for c in table.compensation.credits] == [True]
    assert found.difference.rel_l2 == 0
    feed = {"x": uniform(7, 1, 9, WIDTH)}
    for name, values in outputs_of(settings.model, feed).items():
        np.testing.assert_array_equal(outputs_of(settings.model_out, feed)[name], values)


@pytest.mark.parametrize("make", [swiglu_model, gemm_model])
def test_an_outlier_of_a_projection_moves_into_the_next(
    make: Callable[[Path, float], str], tmp_path: Path
) -> None:
    _, found, _ = compensated(make(tmp_path, 200.0), tmp_path, "smooth", "bias")
    assert sqnr(found, before=False) > sqnr(found, before=True) + 1
    assert found.difference.rel_l2 < 1e-6


def one_linear(folder: Path) -> str:
    g = Graph()
    g.linear("q", "x", uniform(1, WIDTH, HIDDEN))
    return g.saved(folder, ["q"])


@pytest.mark.parametrize("make", [one_linear, lambda folder: norm_model(folder, outlier_gamma(1))])
def test_a_well_behaved_model_is_left_as_it_is(make: Callable[[Path], str], tmp_path: Path) -> None:
    path = make(tmp_path)
    table, found, settings = compensated(path, tmp_path)
    assert not any(credit.kept for credit in found.credits)
    assert found.after == found.before
    before, after = load_model(path), load_model(settings.model_out)
    assert [x.id for x in after.layers] == [x.id for x in before.layers]
    assert table.method == "minmax"
    assert table.compensation is not None
    assert table.compensation.corrections == {} == table.compensation.weight_ratios
    np.testing.assert_array_equal(after.constant("q/w"), before.constant("q/w"))


def test_ranges_are_searched_by_what_the_output_loses(tmp_path: Path) -> None:
    """The largest channel meets a weight of zero: its clipping costs nothing."""
    weight = uniform(1, WIDTH, HIDDEN)
    weight[3] = 0
    g = Graph()
    g.add("Mul", ["x", g.constant("c", outlier_gamma(40))], "scaled")
    g.linear("y", "scaled", weight)
    table, found, _ = compensated(g.saved(tmp_path, ["y"]), tmp_path, "scale")
    assert table.method == "searched"
    searched = table.tensors["scaled"].searched
    assert searched is not None
    assert searched <= table.tensors["scaled"].absmax * 0.1
    assert sqnr(found, before=False) > sqnr(found, before=True) + 15


def test_steps_of_weights_are_searched_by_channel(tmp_path: Path) -> None:
    """One large weight in column 4 meets a channel that is always zero."""
    weight = uniform(1, WIDTH, HIDDEN)
    weight[3, 4] = 3
    g = Graph()
    silent = np.ones(WIDTH, np.float32)
    silent[3] = 0
    g.add("Mul", ["x", g.constant("c", silent)], "scaled")
    g.linear("y", "scaled", weight[:, 4:6])
    table, found, _ = compensated(g.saved(tmp_path, ["y"]), tmp_path, "weights")
    assert table.compensation is not None
    ratios = table.compensation.weight_factors()["y/w"]
    assert ratios[0] == np.float32(0.6)
    assert ratios[1] >= 0.9
    assert sqnr(found, before=False) > sqnr(found, before=True)


def test_outlier_channels_are_read_twice_as_halves(tmp_path: Path) -> None:
    """Eight of 72 channels are four times as large: in halves, the step of all is half as large."""
    g = Graph()
    sizes = np.ones(72, np.float32)
    sizes[8:16] = 4
    g.linear("wide", "x", uniform(5, WIDTH, 72))
    g.add("Mul", ["wide", g.constant("c", sizes)], "scaled")
    g.linear("y", "scaled", uniform(1, 72, HIDDEN))
    _, found, settings = compensated(g.saved(tmp_path, ["y"]), tmp_path, "split")
    kept = [credit for credit in found.credits if credit.kept]
    assert [list(credit.layers) for credit in kept] == [["y"]]
    weight = load_model(settings.model_out).constant("y/w")
    assert weight is not None
    np.testing.assert_array_equal(weight[72:], weight[8:16])
    assert sqnr(found, before=False) > sqnr(found, before=True) + 1
    assert found.difference.rel_l2 < 1e-6


def test_what_changes_the_model_in_fp32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: Workplace, draft: Draft) -> list[Proposal]:
        def apply(best: Draft) -> Draft:
            rewrite = Rewrite(best.model)
            rewrite.put("q", 1, rewrite.constant("q", 1) * np.float32(1.001))
            return Draft(rewrite.finish(), best.ranges, best.method)

        return [Proposal("qkv_proj", {"q": 3.0}, apply)]

    monkeypatch.setattr(steps_of, "STEPS", {"smooth": broken})
    path = norm_model(tmp_path, outlier_gamma(1))
    _, found, settings = compensated(path, tmp_path, "smooth")
    assert [credit.kept for credit in found.credits] == [False]
    assert "not the same in FP32" in found.credits[0].reason
    np.testing.assert_array_equal(
        load_model(settings.model_out).constant("q/w"), load_model(path).constant("q/w")
    )


def test_one_batch_is_too_little(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughEvidenceError):
        compensated(norm_model(tmp_path, outlier_gamma(1)), tmp_path, batches=1)


def test_formats_without_ranges_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one of int8 and fp8"):
        compensated(norm_model(tmp_path, outlier_gamma(1)), tmp_path, fmt="fp16")


def test_fp8_is_smoothed_too(tmp_path: Path) -> None:
    """E4M3 has 2^-9 as its smallest step: a channel 2^16 times the others takes them below it."""
    table, found, _ = compensated(planted_norm(tmp_path, 2.0**17), tmp_path, "smooth", fmt="fp8")
    assert table.compensation is not None
    assert table.compensation.format == "fp8"
    assert sqnr(found, before=False) > sqnr(found, before=True) + 3


def test_compare_and_convert_take_the_new_model_and_table_as_they_are(
    tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    model, feeds = planted_norm(tmp_path, 128), data(tmp_path / "data")
    better, table = str(tmp_path / "better.onnx"), str(tmp_path / "table.json")
    ended = trtdiag(
        "calibrate", model, "--data", feeds, "--compensate", "--out", table, "--model-out", better, "--json"
    )
    assert ended.code == 0
    body = ended.json
    assert body["model"] == better
    assert body["fp32_rel_l2"] < 1e-6
    assert {step["step"] for step in body["steps"]} <= set(steps_of.STEPS)
    held_out = data(tmp_path / "other", 2, seed=900)
    common = ("--format", "int8", "--data", held_out, "--quiet")
    words = ("--calibration", table, "--out", tmp_path / "after")
    assert trtdiag("compare", better, *common, *words).code == 0
    plain = str(tmp_path / "plain.json")
    assert trtdiag("calibrate", model, "--data", feeds, "--out", plain, "--quiet").code == 0
    words = ("--calibration", plain, "--out", tmp_path / "before")
    assert trtdiag("compare", model, *common, *words).code == 0
    scores = [
        min(
            o["metrics"]["sqnr_db"] for o in json.loads((tmp_path / n / "report.json").read_text())["outputs"]
        )
        for n in ("before", "after")
    ]
    assert scores[1] > scores[0] + 20
    typed = str(tmp_path / "typed.onnx")
    words = ("--calibration", table, "--out", typed)
    assert trtdiag("convert", better, "--format", "int8", "--quiet", *words).code == 0
    assert read_table(table, load_model(better).sha256).compensation is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compensate"], "--model-out"),
        (["--model-out", "m.onnx"], "--compensate"),
        (["--compensate", "--model-out", "m.onnx", "--steps", "magic"], "'magic'"),
        (["--compensate", "--model-out", "m.onnx", "--method", "best"], "best"),
        (["--compensate", "--model-out", "m.onnx", "--merge"], "--merge"),
        (["--compensate", "--model-out", "m.onnx", "--jobs", "2"], "--jobs"),
        (["--compensate", "--model-out", "m.onnx", "--tensorrt-version", "10.6.0"], "--tensorrt-version"),
    ],
)
def test_options_that_cannot_work(
    words: list[str], said: str, tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    model, feeds = norm_model(tmp_path, outlier_gamma(1)), data(tmp_path / "data", 2)
    table = str(tmp_path / "t.json")
    ended = trtdiag("calibrate", model, "--data", feeds, "--out", table, *words)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(("model_out", "out"), [("m", "t"), ("t", "t"), ("n", "m")])
def test_each_file_has_a_place_of_its_own(
    tmp_path: Path, trtdiag: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, model_out: str, out: str
) -> None:
    """And it is said before any work is done."""
    monkeypatch.setattr("diag.pipeline.calibrate.compensate.begin", None)
    model, feeds = norm_model(tmp_path, outlier_gamma(1)), data(tmp_path / "data", 2)
    files = {"m": model, "t": str(tmp_path / "t.json"), "n": str(tmp_path / "new.onnx")}
    words = ["--compensate", "--model-out", files[model_out], "--steps", "bias", "--out", files[out]]
    ended = trtdiag("calibrate", model, "--data", feeds, *words)
    assert ended.code == 2
    assert "would replace" in ended.err
    assert not Path(files["t"]).exists()
