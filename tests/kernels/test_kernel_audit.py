"""Asked against built, on real engines and on kernels made to break each promise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from diag.kernels.audit import AuditFact, Request, audit
from diag.kernels.kernel import Kernel, Tensor
from diag.kernels.nodes import built_types, map_nodes, multiplied_in
from diag.kernels.read import read_kernels

Sample = Callable[[str], Path]


def matmuls(kernels: tuple[Kernel, ...]) -> list[str]:
    return sorted({n for k in kernels for n in k.nodes if re.search(r"/MatMul(_1)?$", n)})


def audit_sample(path: Path, asked: str, **more: object) -> dict[str, AuditFact]:
    kernels = read_kernels(path)
    nodes = matmuls(kernels)
    request = Request(dict.fromkeys(nodes, asked), dict.fromkeys(nodes, "MatMul"), **more)  # type: ignore[arg-type]
    return {fact.kind: fact for fact in audit(kernels, request)}


def gemm(
    *nodes: str, types: tuple[str, ...], written: str, tactic: str = "__myelin_CASK_STUB", **more: object
) -> Kernel:
    tensors = tuple(
        Tensor(f"t{i}", (8, 16), dtype, constant=i == len(types) - 1) for i, dtype in enumerate(types)
    )
    name = "+".join(nodes) + "_myl0_1"
    out = (Tensor("y", (8, 16), written),)
    return Kernel(name, "gemm", nodes, tensors, out, tactic, **more)  # type: ignore[arg-type]


def test_int8_engine_without_int8(sample: Sample) -> None:
    path = sample("minilm_weak_int8_inspector.json")
    assert "Int8" not in path.read_text()

    facts = audit_sample(path, "int8")

    absent = facts["format-absent"]
    assert absent.severity == "error"
    assert absent.count == 48
    assert "none of the engine's 52 kernels" in absent.text
    assert "not-lowered" not in facts  # said once, not 48 times
    assert facts["fp16-accumulation"].count == 24
    assert facts["reformats"].count == path.read_text().count('"LayerType": "Reformat"') == 2


def test_int8_engine_as_asked(sample: Sample) -> None:
    assert audit_sample(sample("minilm_int8_inspector.json"), "int8") == {}
    assert audit_sample(sample("rtx_minilm_int8.build.log"), "int8") == {}


def test_fp16_engine_accumulates_in_fp16(sample: Sample) -> None:
    path = sample("minilm_fp16_inspector.json")
    tactics = [layer["TacticName"] for layer in json.loads(path.read_text())["Layers"]]

    facts = audit_sample(path, "fp16")

    assert set(facts) == {"fp16-accumulation"}
    assert facts["fp16-accumulation"].count == sum("f16f16_f16f16_f16" in t for t in tactics)
    assert len(facts["fp16-accumulation"].nodes) == 36  # the QK and PV MatMuls are in fused attention


def test_fp32_engine_runs_tf32(sample: Sample) -> None:
    facts = audit_sample(sample("minilm_fp32_inspector.json"), "fp32")
    assert {kind: fact.severity for kind, fact in facts.items()} == {"tf32": "note"}
    assert facts["tf32"].count == 36
    assert audit_sample(sample("minilm_fp32_inspector.json"), "tf32").keys() == {"tf32"}


def test_decomposed_norms_of_smollm2_run_in_fp16(sample: Sample) -> None:
    kernels = read_kernels(sample("smol_fp16_inspector.json"))
    norms = sorted({n for k in kernels for n in k.nodes if n.endswith("norm/ReduceMean")})
    facts = {f.kind: f for f in audit(kernels, Request({}, {}, norms=norms))}
    assert len(norms) == 61  # two a block, and the last
    assert set(facts["norm-in-fp16"].nodes) == set(norms)


def test_layer_normalizations_of_minilm_compute_in_fp32_inside_an_fp16_engine(sample: Sample) -> None:
    for name in ("minilm_fp16_inspector.json", "rtx_minilm_fp16.build.log"):
        kernels = read_kernels(sample(name))
        norms = sorted({n for k in kernels for n in k.nodes if n.endswith("LayerNormalization")})
        assert len(norms) == 13
        assert "norm-in-fp16" not in {f.kind for f in audit(kernels, Request({}, {}, norms=norms))}
        warned = audit(kernels, Request({}, {}, norms=norms, fp16_norm_warning=True))
        assert "norm-in-fp16" in {f.kind for f in warned}


def test_a_pin_that_the_builder_swallowed() -> None:
    kernel = gemm("a", types=("int8", "int8"), written="int8")
    ops = {"a": "MatMul", "b": "MatMul"}
    wide = gemm("b", types=("fp16", "fp16"), written="fp16")
    facts = audit([kernel, wide], Request({"a": "fp16", "b": "fp16"}, ops, pinned={"a"}))
    assert [(f.kind, f.nodes, f.asked, f.built, f.severity) for f in facts] == [
        ("pin-swallowed", ("a",), "fp16", "int8", "error")
    ]


def test_a_pin_that_spread() -> None:
    shared = gemm("a", "b", types=("fp16", "fp16"), written="fp16")
    other = gemm("c", types=("int8", "int8"), written="int8")
    alone = gemm("d", types=("fp16", "fp16"), written="fp16")
    asked = {"a": "fp16", "b": "int8", "c": "int8", "d": "int8"}
    facts = audit([shared, other, alone], Request(asked, dict.fromkeys(asked, "MatMul"), pinned={"a"}))
    assert [(f.kind, f.nodes) for f in facts] == [("not-lowered", ("d",)), ("pin-spread", ("b",))]


def test_a_node_lowered_without_being_asked() -> None:
    kernels = [
        gemm("a", types=("fp16", "fp16"), written="fp16"),
        gemm("b", types=("fp32", "fp32"), written="fp32"),
    ]
    facts = audit(kernels, Request(dict.fromkeys("ab", "fp32"), dict.fromkeys("ab", "MatMul")))
    assert [(f.kind, f.nodes, f.built) for f in facts] == [("lowered", ("a",), "fp16")]


def test_a_pin_inside_a_fusion_cannot_be_verified() -> None:
    attention = Kernel(
        "_gemm_mha_v2_myl0_6",
        "kgen",
        ("qk", "softmax", "pv"),
        tuple(Tensor(n, (96, 64, 32), "int8") for n in "qkv"),
        (Tensor("y", (96, 64, 32), "int8"),),
        "_gemm_mha_v2_0xe0",
    )
    wide = gemm("x", types=("fp32", "fp32"), written="fp32")
    formats = {"qk": "int8", "softmax": "fp32", "pv": "int8"}
    ops = {"qk": "MatMul", "softmax": "Softmax", "pv": "MatMul"}
    facts = audit([attention, wide], Request(formats, ops, pinned={"softmax"}))
    assert [(f.kind, f.nodes, f.severity) for f in facts] == [("pin-hidden", ("softmax",), "note")]


def test_reformats_are_priced_and_folded_nodes_said() -> None:
    copy = Kernel("__myl_CastTran_myl0_1", "kgen", time_ms=0.25)
    work = gemm("a", types=("fp16", "fp16"), written="fp16", time_ms=0.75)
    asked = {"a": "fp16", "gone": "fp16"}
    facts = {f.kind: f for f in audit([copy, work], Request(asked, dict.fromkeys(asked, "MatMul")))}
    assert facts["reformats"].time_ms == 0.25
    assert "0.25 ms of 1 ms" in facts["reformats"].text
    assert facts["folded"].nodes == ("gone",)


def test_what_a_kernel_multiplies_in() -> None:
    def kernel(*types: tuple[str, bool], tactic: str = "") -> Kernel:
        inputs = tuple(Tensor(str(i), (8, 16), dtype, constant=c) for i, (dtype, c) in enumerate(types))
        return Kernel("k", "gemm", (), (*inputs, Tensor("bias", (1, 16), "int8")), (), tactic)

    assert multiplied_in(kernel(("int8", False), ("int8", True))) == "int8"
    assert multiplied_in(kernel(("int8", False), ("fp16", False), ("int8", True))) == "int8"  # FP16 residual
    assert multiplied_in(kernel(("fp32", False), ("int8", False), ("fp32", True))) == "fp32"  # INT8 residual
    assert multiplied_in(kernel(("fp16", False), ("int4", True))) == "int4"
    assert multiplied_in(kernel(("fp16", False), ("int8", True))) == "fp16"  # weights dequantized on the way
    assert multiplied_in(kernel(("fp16", False), ("fp16", False))) == "fp16"
    assert multiplied_in(kernel(("fp32", False), tactic="sm80_xmma_gemm_f32f32_tf32f32_f32_tn")) == "fp32"
    assert multiplied_in(kernel()) == ""


def test_the_main_kernel_is_the_one_that_multiplies() -> None:
    quantize = Kernel("__myl_MulRouCas_myl0_1", "kgen", ("a",), (), (Tensor("q", (8, 16), "int8"),))
    work = gemm("a", types=("fp16", "fp16"), written="fp16")
    node_map = map_nodes([quantize, work], ["a"])
    assert node_map.main("a", "MatMul") == work
    assert built_types(node_map, {"a": "MatMul"}) == {"a": "fp16"}


def test_nothing_asked_nothing_said() -> None:
    assert audit([], Request({}, {})) == []
    assert map_nodes([], []).coverage == 1.0
