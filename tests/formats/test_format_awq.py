"""The search for INT4: against brute force, on planted channels, and through the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from block_tools import emulated, int4, normal, product, typed

from diag.calibration.awq import search_awq
from diag.calibration.table import Awq, AwqLayer
from diag.cli.main import run as run_command
from diag.errors import TableError
from diag.model import shapes
from diag.numerics.awq import (
    CLIP_RATIOS,
    Layer,
    best_alpha,
    best_ratios,
    channel_factors,
    noise_share,
    rounding_error,
)
from diag.progress import Silent
from diag.typed.blocks import BlockTuning, block_layers
from fixtures.graphs import Dims, bert

WEIGHT = normal(128, 24)
ROWS = normal(96, 128, seed=1)
ONES = np.ones(128, np.float32)
LOUD = np.where(np.arange(128) % 32 == 0, np.float32(20), np.float32(1))
"""One channel of each 32 carries twenty times as much: what AWQ is for."""


def test_factors_are_those_of_the_paper() -> None:
    magnitude = np.array([4, 1, 0.25, 0], np.float32)
    assert channel_factors(magnitude, 1.0).tolist() == [4, 1, 0.25, 1]
    assert channel_factors(magnitude, 0.5).tolist() == [2, 1, 0.5, 1]
    assert channel_factors(magnitude * 100, 0.5).tolist() == [2, 1, 0.5, 1]  # a common factor does nothing
    assert channel_factors(magnitude, 0.0).tolist() == [1, 1, 1, 1]
    assert channel_factors(np.zeros(3, np.float32), 0.5).tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [32, 64])
def test_the_error_is_that_of_int4(size: int) -> None:
    factors = channel_factors(LOUD, 0.5)
    error = rounding_error(Layer(WEIGHT, size), factors).reshape(WEIGHT.shape)
    scaled = WEIGHT * factors[:, None]
    np.testing.assert_allclose(error, (int4(scaled, 0, size) - scaled) / factors[:, None], atol=1e-6)


def test_steps_are_the_best_of_all_for_every_block() -> None:
    layer = Layer(WEIGHT, 32)
    found = best_ratios(layer, ROWS, ONES)
    for block in range(4):
        part = slice(32 * block, 32 * block + 32)
        for column in range(24):
            weights = WEIGHT[part, column].astype(np.float64)
            noise = {}
            for ratio in CLIP_RATIOS:
                step = np.abs(weights).max() * ratio / 7
                error = np.clip(np.rint(weights / step), -8, 7) * step - weights
                noise[ratio] = float(((ROWS[:, part].astype(np.float64) @ error) ** 2).sum())
            chosen = min(CLIP_RATIOS, key=lambda ratio: abs(ratio - found[block, column]))
            assert noise[chosen] <= min(noise.values()) * (1 + 1e-4)


def test_loud_channels_are_found_and_gain_on_rows_held_out() -> None:
    layer, held = Layer(WEIGHT, 128), normal(64, 128, seed=9) * LOUD
    alpha = best_alpha([layer], ROWS * LOUD, LOUD)
    factors = channel_factors(LOUD, alpha)
    assert alpha > 0
    before = noise_share(layer, held, ONES, best_ratios(layer, ROWS * LOUD, ONES))
    after = noise_share(layer, held, factors, best_ratios(layer, ROWS * LOUD, factors))
    assert 10 * np.log10(before / after) > 1


def test_equal_channels_need_no_scale() -> None:
    magnitude = np.abs(ROWS).mean(axis=0)
    assert best_alpha([Layer(WEIGHT, 128)], ROWS, magnitude) == 0


def test_the_typed_model_is_the_searched_arithmetic() -> None:
    """(x / s) INT4(s W), with the steps that were found; and without INT4 s cancels."""
    model = product(WEIGHT)
    factors = channel_factors(LOUD, 0.5)
    ratios = best_ratios(Layer(WEIGHT, 128), ROWS, factors)
    x = ROWS * LOUD
    made = typed(model, "int4", tuning=BlockTuning({"x": factors}, {"product": ratios}))
    effective = WEIGHT + rounding_error(Layer(WEIGHT, 128), factors, ratios).reshape(WEIGHT.shape)
    wanted = x.astype(np.float64) @ effective
    got = emulated(made, {"x": x})["y"]
    np.testing.assert_allclose(got, wanted, atol=1e-4 * float(np.abs(wanted).max()))
    assert made.notes[-1] == "1 Mul(s) undo the scales of 1 INT4 layer(s) at their inputs"
    assert [n.op_type for n in made.proto.graph.node] == ["DequantizeLinear", "Mul", "MatMul"]
    plain = x.astype(np.float64) @ WEIGHT
    np.testing.assert_allclose((x / factors) @ (WEIGHT * factors[:, None]), plain, atol=1e-3)


def test_a_transposed_weight_takes_the_same_search() -> None:
    turned = np.ascontiguousarray(WEIGHT.T)
    factors = channel_factors(LOUD, 0.5)
    ratios = best_ratios(Layer(WEIGHT, 128), ROWS, factors)
    tuning = BlockTuning({"x": factors}, {"product": ratios})
    got = emulated(typed(product(turned, transB=1), "int4", tuning=tuning), {"x": ROWS})["y"]
    wanted = emulated(typed(product(WEIGHT), "int4", tuning=tuning), {"x": ROWS})["y"]
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def searched(rows: list[np.ndarray], weight: np.ndarray = WEIGHT) -> Awq:
    model = product(weight)
    layers = block_layers(model, {"product": "int4"}, shapes.infer(model)).layers
    return search_awq(model, layers, [{"x": x} for x in rows], len(rows), Silent())


def test_a_model_is_searched_and_every_gain_is_held_out() -> None:
    rows = [normal(40, 128, seed=seed) * LOUD for seed in range(4)]
    found = searched(rows)
    layer = found.layers["product"]
    assert layer.sqnr_db_after > layer.sqnr_db_before + 2
    assert list(found.factors) == ["x"]
    fresh = normal(200, 128, seed=77) * LOUD
    exact = fresh.astype(np.float64) @ WEIGHT
    tuning = BlockTuning(found.vectors(), found.step_ratios({"product": 24}))
    noise = emulated(typed(product(WEIGHT), "int4", tuning=tuning), {"x": fresh})["y"] - exact
    plain = emulated(typed(product(WEIGHT), "int4"), {"x": fresh})["y"] - exact
    assert 10 * np.log10((plain**2).sum() / (noise**2).sum()) > 2


def test_weights_that_int4_holds_exactly_are_left_alone() -> None:
    codes = np.random.default_rng(0).integers(-7, 8, (128, 24)).astype(np.float32)
    codes[::32] = 7
    found = searched([normal(40, 128, seed=seed) for seed in range(2)], codes)
    assert found.factors == {}
    assert found.layers["product"].ratios == ""
    assert found.layers["product"].sqnr_db_before == 300


def test_rows_that_are_not_finite_are_refused() -> None:
    bad = ROWS.copy()
    bad[3, 3] = np.nan
    with pytest.raises(TableError, match="'x' is not finite"):
        searched([ROWS, bad])
    with pytest.raises(TableError, match="a single row of 'x'"):
        searched([ROWS[:1]])


def test_damaged_steps_are_refused() -> None:
    layer = AwqLayer(tensor="x", sqnr_db_before=1, sqnr_db_after=2, ratios="abz")
    with pytest.raises(TableError, match="steps of layer 'product' are damaged"):
        Awq(layers={"product": layer}, blocks={"product": 128}, rows=1).step_ratios({"product": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("awq")
    fixture = bert(Dims(hidden=64, heads=2, ffn=128, blocks=1))
    onnx.save(fixture.model, folder / "model.onnx")
    (folder / "data").mkdir()
    for seed in range(4):
        np.savez(folder / "data" / f"{seed}.npz", **fixture.batch(4, seed))
    (folder / "plan.yaml").write_text(
        "schema: trtdiag.plan/1\ndefault: int4\nquantizer: {method: awq, block_size: 32}\n"
    )
    yield folder / "model.onnx"


def command(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        run_command([str(word) for word in words])
    out, err = capfd.readouterr()
    return int(end.value.code or 0), out, err


def test_calibrate_convert_and_compare(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, table = model.parent, tmp_path / "table.json"
    given = ("--plan", folder / "plan.yaml")
    words = ("calibrate", model, *given, "--data", folder / "data", "--json")
    code, said, _ = command(capfd, *words, "--out", table)
    assert code == 0
    layers = json.loads(said)["awq"]
    assert len(layers) == 6
    assert all(layer["sqnr_db_after"] >= layer["sqnr_db_before"] for layer in layers.values())
    command(capfd, *words, "--out", tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == table.read_bytes()

    code, said, _ = command(
        capfd, "convert", model, *given, "--calibration", table, "--out", tmp_path / "typed.onnx", "--json"
    )
    assert (code, json.loads(said)["layers"]["int4"]) == (0, 6)
    onnx.checker.check_model(onnx.load(tmp_path / "typed.onnx"), full_check=True)

    def output_sqnr_db(*more: Any) -> float:
        words = ("compare", model, *more, "--data", folder / "data", "--out", tmp_path / "out", "--json")
        code, said, _ = command(capfd, *words, "--quiet")
        assert code == 0
        return float(json.loads(said)["outputs"][0]["metrics"]["sqnr_db"])

    plain = tmp_path / "plain.yaml"
    plain.write_text("schema: trtdiag.plan/1\ndefault: int4\nquantizer: {block_size: 32}\n")
    better = output_sqnr_db(*given, "--calibration", table)
    assert better > output_sqnr_db("--plan", plain) + 1
    assert output_sqnr_db(*given) == better  # searched on the data given, which are the same


def test_what_is_missing_is_one_sentence(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = model.parent
    words = ("convert", model, "--plan", folder / "plan.yaml", "--out", tmp_path / "typed.onnx")
    code, _, err = command(capfd, *words)
    assert code == 2
    assert "wants INT4 scales searched" in err
    table = tmp_path / "ranges.json"
    command(capfd, "calibrate", model, "--data", folder / "data", "--out", table, "--quiet")
    code, _, err = command(capfd, *words, "--calibration", table)
    assert code == 2
    assert "holds no search of INT4's scales" in err
    other = tmp_path / "other.yaml"
    other.write_text("schema: trtdiag.plan/1\ndefault: int4\nquantizer: {method: awq, block_size: 64}\n")
    searched_table = tmp_path / "searched.json"
    given = ("--plan", folder / "plan.yaml", "--data", folder / "data", "--quiet")
    command(capfd, "calibrate", model, *given, "--out", searched_table)
    code, _, err = command(
        capfd, "convert", model, "--plan", other, "--calibration", searched_table, "--out", "typed.onnx"
    )
    assert code == 2
    assert "are for blocks of 32, and the plan has 64" in err
