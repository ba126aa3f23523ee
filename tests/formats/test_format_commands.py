"""Every format by its name through the commands, on a small transformer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from ended import Ended

from diag.cli.main import run as run_command
from diag.plan.schema import plan_for_format
from fixtures.graphs import Dims, bert

FORMATS = ["tf32", "fp16", "bf16", "fp8", "int8", "int4", "mxfp8", "nvfp4"]
NEEDS_TABLE = {"fp8", "int8", "nvfp4"}
OPSETS = {"int4": 21, "nvfp4": 23}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    fixture = bert(Dims(hidden=64, heads=2, ffn=128, blocks=1))
    onnx.save(fixture.model, folder / "model.onnx")
    (folder / "data").mkdir()
    for seed in range(3):
        np.savez(folder / "data" / f"{seed}.npz", **fixture.batch(2, seed))
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def table(model: Path) -> Path:
    path = model.parent / "table.json"
    with pytest.raises(SystemExit):
        run_command(
            ["calibrate", str(model), "--data", str(model.parent / "data"), "--out", str(path), "--quiet"]
        )
    return path


@pytest.mark.parametrize("fmt", FORMATS)
def test_convert_writes_every_format(
    fmt: str, model: Path, table: Path, tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    given = ("--calibration", table) if fmt in NEEDS_TABLE else ()
    out = tmp_path / "typed.onnx"
    code, said, err = trtdiag("convert", model, "--format", fmt, *given, "--out", out, "--json")
    assert (code, err) == (0, "")
    assert json.loads(said)["layers"][fmt] > 0
    proto = onnx.load(out)
    onnx.checker.check_model(proto, full_check=True)
    assert max(o.version for o in proto.opset_import) >= OPSETS.get(fmt, 0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_compare_measures_every_format(
    fmt: str, model: Path, tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    words = ("compare", model, "--format", fmt, "--data", model.parent / "data", "--out", tmp_path, "--json")
    code, said, _ = trtdiag(*words, "--quiet")
    report = json.loads(said)
    assert code == 0
    said_of_it = {"tf32": "ONNX has no such type", "mxfp8": "domain trt", "nvfp4": "domain trt"}
    assert said_of_it.get(fmt, "") in report["run"]["flags"].get("plan notes", "")
    lowered = {layer["name"] for layer in report["layers"] if layer["format"] == fmt}
    assert lowered
    assert any(layer["local"] for layer in report["layers"] if layer["name"] in lowered)
    worst = min(output["metrics"]["sqnr_db"] for output in report["outputs"])
    assert (5 if fmt in ("int4", "nvfp4") else 18) < worst < 100


@pytest.mark.parametrize("fmt", ["int4", "mxfp8", "nvfp4"])
def test_rank_and_pin_take_the_block_formats(
    fmt: str, model: Path, tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    given = ("--format", fmt, "--data", model.parent / "data", "--json", "--quiet")
    code, _, _ = trtdiag("rank", model, *given, "--target", "sqnr_db>=20", "--out", tmp_path / "ranking")
    assert code == 0
    ranking = json.loads((tmp_path / "ranking" / "ranking.json").read_text())
    assert [len(group["layers"]) for group in ranking["groups"]].count(3) == 1  # Q, K and V move together
    assert sum(len(group["layers"]) for group in ranking["groups"]) == 6
    code, _, _ = trtdiag("pin", model, *given, "--target", "sqnr_db>=22", "--out", tmp_path / "pinned")
    assert code == 0
    assert (tmp_path / "pinned" / "typed.onnx").is_file()


def test_a_misspelt_format_is_one_sentence(model: Path, trtdiag: Callable[..., Ended]) -> None:
    code, _, err = trtdiag("convert", model, "--format", "nvfp8", "--out", "x.onnx")
    assert code == 2
    assert "default cannot be 'nvfp8'" in err
    assert "Did you mean" in err
    assert "Traceback" not in err


def test_int4_beside_int8_in_one_plan(
    model: Path, table: Path, tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema: trtdiag.plan/1\ndefault: int8\nbase: fp16\n"
        "pins:\n  - {role: ffn_down, format: int4}\n  - {role: ffn_up, format: mxfp8}\n"
        "quantizer: {block_size: 64}\n"
    )
    words = ("--plan", plan, "--calibration", table, "--out", tmp_path / "typed.onnx", "--json")
    code, said, _ = trtdiag("convert", model, *words)
    assert code == 0
    layers = json.loads(said)["layers"]
    assert (layers["int4"], layers["mxfp8"], layers["int8"]) == (1, 1, 6)


def test_a_block_size_that_does_not_divide_is_one_sentence(
    model: Path, tmp_path: Path, trtdiag: Callable[..., Ended]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("schema: trtdiag.plan/1\ndefault: int4\nquantizer: {block_size: 128}\n")
    code, _, err = trtdiag("convert", model, "--plan", plan, "--out", tmp_path / "typed.onnx")
    assert code == 2
    assert "blocks of 128 do not divide the 64 elements that layer" in err
    assert not (tmp_path / "typed.onnx").exists()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_is_a_plan(fmt: str) -> None:
    assert plan_for_format(fmt).default == fmt
