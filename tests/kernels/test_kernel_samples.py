"""Kernel lists of real engines, checked against counts taken from the files by other means."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from diag.kernels.nodes import MULTIPLYING_OPS, built_types, map_nodes
from diag.kernels.read import detect_source, read_kernels
from diag.kernels.verbose_log import warns_of_fp16_norms

Sample = Callable[[str], Path]

INSPECTOR = [
    "minilm_fp32_inspector.json",
    "minilm_fp16_inspector.json",
    "minilm_int8_inspector.json",
    "minilm_weak_int8_inspector.json",
    "smol_fp16_inspector.json",
]
RTX = ["rtx_minilm_fp16.build.log", "rtx_minilm_int8.build.log"]

# TensorRT's words in these files, and ours.
WORDS = {
    "Float": "fp32",
    "Half": "fp16",
    "Int8": "int8",
    "Int32": "int32",
    "Int64": "int64",
    "Bool": "bool",
    "Row major linear FP32": "fp32",
    "Row major linear FP16 format": "fp16",
}


@pytest.mark.parametrize("name", INSPECTOR)
def test_inspector_agrees_with_its_json(name: str, sample: Sample) -> None:
    layers = json.loads(sample(name).read_text())["Layers"]
    tensors = [t for layer in layers for t in layer["Inputs"] + layer["Outputs"]]

    kernels = read_kernels(sample(name))

    assert detect_source(sample(name)) == "inspector"
    assert [k.name for k in kernels] == [layer["Name"] for layer in layers]
    assert Counter(t.dtype for k in kernels for t in (*k.inputs, *k.outputs)) == Counter(
        WORDS[t["Format/Datatype"]] for t in tensors
    )
    assert {n for k in kernels for n in k.nodes} == {
        name for layer in layers for name in re.findall(r"ONNX Layer: ([^\]]*)\]", layer["Metadata"])
    }
    assert [list(t.dims) for k in kernels for t in (*k.inputs, *k.outputs)] == [
        t["Dimensions"] for t in tensors
    ]


def test_log_and_inspector_of_one_build_are_the_same(sample: Sample) -> None:
    from_log = read_kernels(sample("minilm_fp16_verbose_tail.log"))
    assert from_log == read_kernels(sample("minilm_fp16_inspector.json"))


@pytest.mark.parametrize("name", RTX)
def test_rtx_log_agrees_with_its_text(name: str, sample: Sample) -> None:
    text = sample(name).read_text()
    lines = [line for line in text.splitlines() if line.startswith("Name: ")]
    datatypes = Counter(WORDS[word] for word in re.findall(r"Datatype: (\w+)", "\n".join(lines)))

    kernels = read_kernels(sample(name))

    assert detect_source(sample(name)) == "log"
    assert len(kernels) == len(lines)
    assert sum(len(k.inputs) + len(k.outputs) for k in kernels) == "\n".join(lines).count("{ Name: ")
    assert Counter(t.dtype for k in kernels for t in (*k.inputs, *k.outputs)) == datatypes
    assert sum(t.constant for k in kernels for t in k.inputs) > 100


@pytest.mark.parametrize(
    ("name", "count", "accumulators"),
    [
        ("minilm_fp32_inspector.json", 67, {"fp32": 36}),
        ("minilm_fp16_inspector.json", 50, {"fp16": 24, "": 6}),
        ("minilm_int8_inspector.json", 50, {"int32": 24, "": 6}),
        ("minilm_weak_int8_inspector.json", 52, {"fp16": 24, "": 6}),
        ("smol_fp16_inspector.json", 334, {"fp16": 151, "fp32": 1, "": 30}),
    ],
)
def test_accumulators_of_multiplying_kernels(
    name: str, count: int, accumulators: dict[str, int], sample: Sample
) -> None:
    kernels = read_kernels(sample(name))
    assert len(kernels) == count
    assert Counter(k.accumulator for k in kernels if k.multiplies) == accumulators
    assert not any(k.accumulator for k in kernels if not k.multiplies)


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("minilm_fp32_inspector.json", "fp32"),
        ("minilm_fp16_inspector.json", "fp16"),
        ("minilm_int8_inspector.json", "int8"),
        ("minilm_weak_int8_inspector.json", "fp16"),
        ("rtx_minilm_fp16.build.log", "fp16"),
        ("rtx_minilm_int8.build.log", "int8"),
    ],
)
def test_every_matmul_of_minilm_has_one_multiplying_kernel_of_its_type(
    name: str, built: str, sample: Sample
) -> None:
    # MiniLM: six blocks, and in each Q, K, V, QK, PV, the attention's output and two of the FFN.
    kernels = read_kernels(sample(name))
    matmuls = sorted({n for k in kernels for n in k.nodes if re.search(r"/MatMul(_1)?$", n)})
    assert len(matmuls) == 48

    node_map = map_nodes(kernels, matmuls)

    assert node_map.coverage == 1.0
    assert all(sum(k.multiplies for k in node_map.kernels_of[n]) == 1 for n in matmuls)
    assert built_types(node_map, dict.fromkeys(matmuls, "MatMul")) == dict.fromkeys(matmuls, built)
    assert "MatMul" in MULTIPLYING_OPS


def test_the_projections_share_a_kernel(sample: Sample) -> None:
    kernels = read_kernels(sample("rtx_minilm_int8.build.log"))
    prefix = "/m/encoder/layer.0/attention/self/"
    nodes = [f"{prefix}{part}/MatMul" for part in ("query", "key", "value")]
    node_map = map_nodes(kernels, nodes)
    assert len({node_map.main(node, "MatMul") for node in nodes}) == 1


def test_quantizers_are_foreign_to_the_users_model(sample: Sample) -> None:
    kernels = read_kernels(sample("minilm_int8_inspector.json"))
    named = {n for k in kernels for n in k.nodes}
    own = [n for n in named if not n.endswith(("QuantizeLinear", "DequantizeLinear"))]
    node_map = map_nodes(kernels, [*own, "/never/there"])
    assert set(node_map.foreign) == named - set(own)
    assert node_map.folded == ("/never/there",)
    assert node_map.coverage == pytest.approx(len(own) / (len(own) + 1))
    assert node_map.main("/never/there", "MatMul") is None


def test_parser_warning_is_found() -> None:
    assert warns_of_fp16_norms(["[INFO] x", "[WARNING] Detected layernorm nodes in FP16."])
    assert not warns_of_fp16_norms(["[VERBOSE] Found and reassigned Myelin backends for LayerNorm nodes"])
