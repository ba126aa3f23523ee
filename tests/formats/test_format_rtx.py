"""Every format through the real compiler: TensorRT-RTX builds what it has a target for, in the type asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from block_tools import normal, product, typed, whole

from diag.engines.build import BuildOptions, BuildResult, build_rtx
from diag.errors import EngineError
from diag.kernels.audit import Request, audit
from diag.kernels.nodes import built_types, map_nodes

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None,
        reason="the TensorRT-RTX wheel is not installed (pip install 'trtdiag[rtx]')",
    ),
]

X = normal(8, 256)
BLACKWELL = "SM120"


def build(
    fmt: str, folder: Path, target: str = "SM89", base: str = "fp16", rows: tuple[int, ...] = (8,)
) -> BuildResult:
    path = folder / "typed.onnx"
    scales = X if fmt == "nvfp4" else None
    model = product(normal(256, 128, seed=2), rows)
    onnx.save(whole(typed(model, fmt, scales, base=base)), path)
    return build_rtx(path, compute_capability=target, options=BuildOptions(timeout_s=120))


def types(result: BuildResult) -> set[str]:
    return {dtype for kernel in result.kernels for dtype in kernel.dtypes}


def product_types(result: BuildResult) -> dict[str, str]:
    return built_types(map_nodes(result.kernels, ["product"]), {"product": "MatMul"})


def request(fmt: str) -> Request:
    return Request({"product": fmt}, {"product": "MatMul"})


@pytest.mark.parametrize("base", ["fp32", "fp16", "bf16"])
def test_int4_weights_reach_a_kernel(base: str, tmp_path: Path) -> None:
    assert types(build("int4", tmp_path, base=base)) >= {base, "int4"}


@pytest.mark.parametrize("base", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("target", ["SM89", BLACKWELL])
def test_mxfp8_compiles(base: str, target: str, tmp_path: Path) -> None:
    result = build("mxfp8", tmp_path, target, base)
    assert types(result) >= {base, "fp8"}
    assert any("Dyna" in kernel.name for kernel in result.kernels)  # scales found while it runs


@pytest.mark.parametrize("base", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rows", [(8,), (2, 4)])
def test_nvfp4_compiles_for_blackwell(base: str, rows: tuple[int, ...], tmp_path: Path) -> None:
    result = build("nvfp4", tmp_path, BLACKWELL, base, rows)
    assert any("Dyna" in kernel.name for kernel in result.kernels)
    assert types(result) >= {base, "fp4"}
    assert product_types(result) == {"product": "fp4"}
    assert [fact for fact in audit(result.kernels, request("nvfp4")) if fact.kind == "not-lowered"] == []


def test_nvfp4_for_older_targets_is_refused_by_the_builder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="HW-specific datatypes"):
        build("nvfp4", tmp_path, "SM89")


def test_a_tf32_file_is_an_fp32_file_to_the_builder(tmp_path: Path) -> None:
    assert types(build("tf32", tmp_path, base="fp32")) <= {"fp32", "tf32"}


def test_a_transposed_gemm_in_int4(tmp_path: Path) -> None:
    path = tmp_path / "typed.onnx"
    onnx.save(whole(typed(product(normal(128, 256), (8,), transB=1), "int4", base="fp16")), path)
    assert "int4" in types(build_rtx(path, options=BuildOptions(timeout_s=120)))
    assert np.isfinite(X).all()
