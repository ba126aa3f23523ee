"""Real models through TensorRT-RTX: every multiplying layer is mapped to a kernel of the plan's type."""

from __future__ import annotations

import importlib.util
import json

import pytest

from diag.errors import TrtdiagError
from fixtures import real

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None,
        reason="the TensorRT-RTX wheel is not installed (pip install 'trtdiag[rtx]')",
    ),
]

MIXED = """
schema: trtdiag.plan/1
default: int8
pins:
  - {role: pv_matmul, format: fp16}
  - {role: attn_softmax, format: fp32}
"""


def ready(make):
    try:
        return make()
    except TrtdiagError as error:
        pytest.skip(str(error))


def build(trtdiag, model, data, out, *plan):
    words = ("--data", data, "--limit", 1, "--engine", "tensorrt-rtx", "--out", out, "--json")
    ended = trtdiag("build", model, *plan, *words)
    assert ended.code == 0, ended.err
    return ended.json


@pytest.mark.export
@pytest.mark.parametrize("fmt", ["fp16", "int8"])
def test_minilm(trtdiag, tmp_path, fmt):
    model, data = ready(real.minilm), ready(lambda: real.minilm_data("en_calib"))
    engine = tmp_path / "m.engine"
    found = build(trtdiag, model, data, engine, "--format", fmt)
    assert found["built"] == {fmt: {fmt: 48}}
    ended = trtdiag("inspect", engine, "--model", model, "--format", fmt, "--strict", "--json")
    assert ended.code == 0
    matmuls = [layer for layer in ended.json["layers"] if layer["op_type"] == "MatMul"]
    assert len(matmuls) == 48
    assert all(f"built in {fmt} by kernel" in layer["reason"] for layer in matmuls)


@pytest.mark.export
def test_minilm_mixed(trtdiag, tmp_path):
    model, data = ready(real.minilm), ready(lambda: real.minilm_data("en_calib"))
    plan = tmp_path / "plan.yaml"
    plan.write_text(MIXED)
    engine = tmp_path / "m.engine"
    found = build(trtdiag, model, data, engine, "--plan", plan)
    assert found["built"] == {"int8": {"int8": 42}, "fp16": {"fp16": 6}, "fp32": {"fp32": 6}}
    assert trtdiag("inspect", engine, "--model", model, "--plan", plan, "--strict", "--quiet").code == 0


VIT = {"fp16": {"fp16": 101}, "int8": {"int8": 98, "fp32": 3}}
"""TensorRT-RTX 1.7 builds quantized ConvTransposes in FP32, and widens their INT8 weights at run time."""


@pytest.mark.parametrize("fmt", ["fp16", "int8"])
def test_vit(trtdiag, tmp_path, fmt):
    model = ready(real.vit)
    engine = tmp_path / "v.engine"
    found = build(trtdiag, model, "random:0:batch_size=4", engine, "--format", fmt)
    assert found["built"] == {fmt: VIT[fmt]}
    ended = trtdiag("inspect", engine, "--model", model, "--format", fmt, "--strict", "--json")
    matmuls = [layer for layer in ended.json["layers"] if layer["op_type"] in ("MatMul", "Gemm", "Conv")]
    assert len(matmuls) == 98
    assert all(f"built in {fmt} by kernel" in layer["reason"] for layer in matmuls)
    unmet = [f for f in ended.json["findings"] if f["kind"] == "precision-not-built"]
    honoured = next(c for c in ended.json["gate"]["checks"] if c["name"] == "requests not honoured")
    assert honoured["passed"] is (fmt == "fp16")
    assert [sorted(f["layers"]) for f in unmet] == (
        [[f"/decoder/upconv{n}/ConvTranspose" for n in (1, 2, 3)]] if fmt == "int8" else []
    )


def test_the_parser_itself_warns_of_the_vits_norms_in_fp16(trtdiag, tmp_path):
    model = ready(real.vit)
    found = build(trtdiag, model, "random:0:batch_size=4", tmp_path / "v.engine", "--format", "fp16")
    norms = next(fact for fact in found["audit"] if fact["kind"] == "norm-in-fp16")
    assert norms["text"].startswith("TensorRT's parser warns of LayerNorm nodes in FP16")
    assert len(norms["nodes"]) == 216


def test_vit_mixed(trtdiag, tmp_path):
    model = ready(real.vit)
    plan = tmp_path / "plan.yaml"
    plan.write_text(MIXED.replace("  - {role: attn_softmax, format: fp32}\n", ""))
    engine = tmp_path / "v.engine"
    found = build(trtdiag, model, "random:0:batch_size=4", engine, "--plan", plan)
    assert found["built"]["fp16"] == {"fp16": 12}
    assert found["built"]["int8"]["int8"] == 86
    errors = [fact for fact in found["audit"] if fact["severity"] == "error"]
    assert all("ConvTranspose" in json.dumps(fact["nodes"]) for fact in errors)
