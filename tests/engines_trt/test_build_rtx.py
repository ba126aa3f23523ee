"""Real builds with TensorRT-RTX on a CPU, and the types that it really built."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest

from diag.engines.build import BuildOptions, build_rtx
from diag.engines.stamp import Identity, check_stamp
from diag.errors import EngineError
from diag.kernels.audit import Request, audit
from diag.kernels.kernel import Kernel
from diag.kernels.nodes import built_types, map_nodes
from diag.kernels.read import detect_source, read_kernels

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None,
        reason="the TensorRT-RTX wheel is not installed (pip install 'trtdiag[rtx]')",
    ),
]

SHAPES = BuildOptions(profiles={"x": ((1, 64), (8, 64), (16, 64))}, timeout_s=300)
OPS: Mapping[str, str] = {"first": "MatMul", "second": "MatMul", "relu": "Relu"}


def types(kernels: tuple[Kernel, ...]) -> dict[str, str]:
    return built_types(map_nodes(kernels, ["first", "second"]), OPS)


def test_fp32_engine_is_kept_with_its_log_and_stamp(fp32_model: Path, tmp_path: Path) -> None:
    engine = tmp_path / "out" / "m.engine"
    result = build_rtx(fp32_model, engine, options=SHAPES, identity=Identity("m" * 64))

    assert types(result.kernels) == {"first": "fp32", "second": "fp32"}
    assert map_nodes(result.kernels, OPS).coverage == 1.0
    assert result.engine_bytes == engine.stat().st_size
    assert detect_source(engine) == "engine"
    assert read_kernels(engine) == result.kernels
    assert 0 < result.seconds <= result.wall_seconds
    stamp = check_stamp(engine, Identity("m" * 64), flavour="tensorrt-rtx", compute_capability="SM89")
    assert stamp.version == result.version
    assert stamp.kernels == len(result.kernels)


def test_fp16_by_casts(fp16_model: Path) -> None:
    result = build_rtx(fp16_model, options=SHAPES)
    assert types(result.kernels) == {"first": "fp16", "second": "fp16"}
    facts = audit(result.kernels, Request(dict.fromkeys(("first", "second"), "fp16"), OPS))
    assert {fact.kind for fact in facts} <= {"reformats"}  # the casts at the model's borders


def test_int8_by_quantizers_with_a_pin(mixed_model: Path) -> None:
    result = build_rtx(mixed_model, options=SHAPES)
    assert types(result.kernels) == {"first": "int8", "second": "fp32"}
    request = Request({"first": "int8", "second": "fp32"}, OPS, pinned={"second"})
    assert not [fact for fact in audit(result.kernels, request) if fact.severity == "error"]


def test_an_fp32_model_asked_in_int8_is_caught(fp32_model: Path) -> None:
    result = build_rtx(fp32_model, options=SHAPES)
    facts = audit(result.kernels, Request(dict.fromkeys(("first", "second"), "int8"), OPS))
    assert [(f.kind, f.count) for f in facts if f.severity == "error"] == [("format-absent", 2)]


def test_every_refused_node_is_listed(refused_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="refuses 3 of the model's nodes") as caught:
        build_rtx(refused_model, tmp_path / "m.engine", options=SHAPES)
    text = str(caught.value)
    assert "bad/one (Nonsense)" in text
    assert "bad/two (Det): the operator is not supported" in text
    assert "bad/three (Absurd)" in text
    assert "fine" not in text


def test_debug_tensors_keep_the_kernels_and_outputs_do_not(fp16_model: Path) -> None:
    counts = {}
    for marks in ("none", "unfused", "all"):
        options = BuildOptions(profiles=SHAPES.profiles, marks=marks)
        counts[marks] = len(build_rtx(fp16_model, options=options).kernels)
    assert counts["unfused"] == counts["none"] < counts["all"]


@pytest.mark.parametrize("target", ["SM75", "SM86", "SM120"])
def test_other_targets(target: str, fp16_model: Path) -> None:
    result = build_rtx(fp16_model, compute_capability=target, options=SHAPES)
    assert types(result.kernels) == {"first": "fp16", "second": "fp16"}


@pytest.mark.parametrize(
    ("options", "target", "says"),
    [
        (BuildOptions(), "SM89", "input 'x' has dynamic shape"),
        (BuildOptions(profiles={"z": ((1, 64),) * 3}), "SM89", r"\['z'\], which are no inputs"),
        (BuildOptions(profiles={"x": ((9, 64), (8, 64), (16, 64))}), "SM89", "(?i)profile|shapes"),
        (BuildOptions(profiles=SHAPES.profiles, flags=("FP16",)), "SM89", "no builder flag 'FP16'"),
        (BuildOptions(profiles=SHAPES.profiles, opt_level=9), "SM89", "level 9 does not exist"),
        (SHAPES, "SM90", "no compute capability .* SM120"),
    ],
)
def test_what_cannot_be_asked(options: BuildOptions, target: str, says: str, fp32_model: Path) -> None:
    with pytest.raises(EngineError, match=says):
        build_rtx(fp32_model, compute_capability=target, options=options)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(b"nonsense")
    with pytest.raises(EngineError, match="refuses"):
        build_rtx(file, options=SHAPES)
