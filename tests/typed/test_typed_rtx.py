"""Typed models through the real compiler: TensorRT-RTX builds them, and builds what the plan asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
import pytest
from typed_tools import FLOAT, Rewritten, apply_as, graph, node, normal, rewrite, whole

from diag.engines.build import BuildOptions, BuildResult, build_rtx
from diag.kernels.audit import Request, audit
from diag.kernels.nodes import MULTIPLYING_OPS, built_types, map_nodes
from diag.model.load import from_proto
from diag.plan.schema import Plan
from fixtures.graphs import Dims, GraphFixture, bert, cnn, conformer, detector, gpt2, llama, vit

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None,
        reason="the TensorRT-RTX wheel is not installed (pip install 'trtdiag[rtx]')",
    ),
]

FIXED = Dims(hidden=64, heads=4, kv_heads=2, ffn=128, blocks=1, seq_len=16, batch=2, seq=16)
FAMILIES: dict[str, Callable[[], GraphFixture]] = {
    **{make.__name__: partial(make, FIXED) for make in (bert, gpt2, llama, conformer)},
    "vit": partial(vit, FIXED),
    "cnn": partial(cnn, blocks=1),
    "detector": detector,
}
PLANS = {
    "fp16": Plan(default="fp16"),
    "bf16": Plan(default="bf16"),
    "int8": Plan(default="int8"),
    "int8+fp16": Plan(default="int8", base="fp16"),
}
ASKED = {"fp16": "fp16", "bf16": "bf16", "int8": "int8", "int8+fp16": "int8"}


def with_batch(fixture: GraphFixture, size: int) -> onnx.ModelProto:
    """The model with its symbolic batch made a number, so that no profile is needed."""
    proto = onnx.ModelProto()
    proto.CopyFrom(fixture.model)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = size
    return proto


def build(case: Rewritten, folder: Path) -> BuildResult:
    path = folder / "typed.onnx"
    onnx.save(whole(case.typed), path)
    return build_rtx(path, options=BuildOptions(timeout_s=120))


def built(case: Rewritten, result: BuildResult) -> dict[str, str]:
    """Types in which the products were built."""
    ops = {x.id: x.op_type for x in case.model.layers if x.op_type in MULTIPLYING_OPS}
    return built_types(map_nodes(result.kernels, ops), ops)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FAMILIES)
def test_typed_models_compile(name: str, plan: str, tmp_path: Path) -> None:
    fixture = FAMILIES[name]()
    model = from_proto(with_batch(fixture, 2))
    case = rewrite(model, PLANS[plan], fixture.batch(2))
    result = build(case, tmp_path)
    assert result.kernels
    types = {dtype for kernel in result.kernels for dtype in kernel.dtypes}
    assert ASKED[plan] in types
    if name in ("bert", "vit"):
        found = built(case, result)
        products = [x.id for x in model.layers if x.op_type == "MatMul"]
        assert len(products) == 8  # Q, K, V, QK, PV, output and the two of the FFN
        assert {found[layer] for layer in products} == {ASKED[plan]}
        request = Request(
            {layer: case.typed.formats[layer] for layer in products}, dict.fromkeys(products, "MatMul")
        )
        assert [fact for fact in audit(result.kernels, request) if fact.severity == "error"] == []


def test_a_pin_is_built_as_asked(tmp_path: Path) -> None:
    fixture = FAMILIES["bert"]()
    model = from_proto(with_batch(fixture, 2))
    pinned = fixture.nodes("ffn_down", 0)[0]
    plan = Plan.model_validate(
        {"schema": "trtdiag.plan/1", "default": "int8", "pins": [{"match": pinned, "format": "fp32"}]}
    )
    case = rewrite(model, plan, fixture.batch(2))
    found = built(case, build(case, tmp_path))
    weighted = {x.id for x in model.layers if x.op_type == "MatMul" and x.inputs[1] in model.initializers}
    assert {layer: found[layer] for layer in weighted} == {
        layer: "fp32" if layer == pinned else "int8" for layer in weighted
    }


def test_weights_on_either_side_and_along_any_axis(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "left x", "a", "on_the_left"),
        node("MatMul", "a right", "b", "on_the_right"),
        node("Gemm", "b table bias", "y", "transposed", transB=1),
    ]
    constants = {
        "left": normal(64, 64),
        "right": normal(32, 64, seed=1),
        "table": normal(32, 64, seed=2),
        "bias": normal(32, seed=3),
    }
    model = graph(nodes, {"x": (FLOAT, [64, 32])}, constants=constants)
    case = apply_as(
        model, dict.fromkeys(("on_the_left", "on_the_right", "transposed"), "int8"), {"x": normal(64, 32)}
    )
    assert set(built(case, build(case, tmp_path)).values()) == {"int8"}


@pytest.mark.parametrize("group", [1, 4])
def test_transposed_convolutions_compile(group: int, tmp_path: Path) -> None:
    nodes = [node("ConvTranspose", "x w", "y", "up", group=group, strides=[2, 2])]
    model = graph(nodes, {"x": (FLOAT, [1, 16, 8, 8])}, constants={"w": normal(16, 16 // group, 3, 3)})
    case = apply_as(model, {"up": "int8"}, {"x": normal(1, 16, 8, 8)})
    assert build(case, tmp_path).kernels
