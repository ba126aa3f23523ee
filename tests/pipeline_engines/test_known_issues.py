"""Every reported defect fits a graph and a version that have it, and none that do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.kernels.kernel import Kernel, Tensor
from diag.kernels.known import Build, Versions, capability_name, known_issues, match_known_issues
from diag.model.load import from_proto


def kernel(name="k", dtype="fp16"):
    return Kernel(name, "gemm", ("n",), (), (Tensor("y", (8, 8), dtype),))


def chain(*ops, branch=None, constants=None):
    """A graph of `ops` in a row; `branch`: (position of a producer, op) reads that tensor too."""
    nodes, name = [], "x"
    for number, op in enumerate(ops):
        inputs = [name, "c"] if op in ("MatMul", "Conv", "ConvTranspose", "Add", "Mul", "CumSum") else [name]
        if op == "If":
            inputs = ["flag"]
        nodes.append(helper.make_node(op, inputs, [f"t{number}"], f"{op.lower()}{number}"))
        name = f"t{number}"
    if branch:
        nodes += branch
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(4, np.float32), "c"), *(constants or [])],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def graph(nodes, constants=()):
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        list(constants),
    )
    return from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]))


def node(op, inputs, output):
    return helper.make_node(op, inputs.split(), [output], f"n_{output}")


def attention(first="x"):
    return [
        node("MatMul", f"{first} k", "s"),
        node("Mul", "s c", "scaled"),
        node("Softmax", "scaled", "p"),
        node("MatMul", "p v", "y"),
    ]


def axis(name, value):
    return numpy_helper.from_array(np.int64(value), name)


RESIDUAL = [
    node("Split", "x", "left"),
    node("Conv", "x w", "conv"),
    node("Sigmoid", "conv", "gate"),
    node("Mul", "conv gate", "silu"),
    node("Add", "left silu", "sum"),
]
CASES = {
    "fused-attention-consumer-blackwell": (None, "10.16.1", "12.0", kernel("_gemm_mha_v2_0x1")),
    "gemm-mha-v2-early-access": (None, "10.0.0", "8.0", kernel("_gemm_mha_v2_0x1")),
    "gridsample-deformable-attention": (
        graph(
            [
                node("GridSample", "x grid", "g"),
                node("Concat", "g g", "all"),
                node("Mul", "all w", "m"),
                node("ReduceSum", "m", "y"),
            ]
        ),
        "11.1.0.106",
        "8.9",
        kernel(dtype="fp32"),
    ),
    "cumsum-twice": (
        graph([node("CumSum", "x a0", "l"), node("CumSum", "x a1", "y")], [axis("a0", 0), axis("a1", 1)]),
        "10.11.0",
        "8.6",
        kernel(dtype="fp32"),
    ),
    "convtranspose-quantizer-axis": (chain("Relu", "ConvTranspose"), "8.2.0", "7.5", kernel(dtype="int8")),
    "half-clip-zeros": (chain("Clip"), "8.5.1", "8.6", kernel()),
    "vit-fp16-on-10-3": (graph(attention()), "10.3.0", "8.6", kernel()),
    "detr-fp16-by-gpu-generation": (
        graph([*attention(), node("GridSample", "y grid", "z")]),
        "8.6.1",
        "8.6",
        kernel(),
    ),
    "residual-add-int8": (chain("Conv", "Add"), "8.6.1", "8.0", kernel(dtype="int8")),
    "strided-concat-under-residual-add": (
        graph([*RESIDUAL, node("Concat", "left sum", "y")]),
        "11.2.1.2",
        "12.0",
        kernel(),
    ),
    "if-transpose-resize": (chain("If", "Transpose", "Resize"), "11.1.0", "7.5", kernel(dtype="fp32")),
    "transposed-input-into-attention": (
        graph([node("Transpose", "x", "xt"), *attention("xt")]),
        "11.2.1",
        "8.9",
        kernel("_gemv_mha_v1"),
    ),
    "segformer-batch": (
        graph(
            [
                node("LayerNormalization", "x c", "ln"),
                node("Reshape", "ln shape", "im"),
                node("Conv", "im w", "short"),
                node("Reshape", "short shape", "seq"),
                node("LayerNormalization", "seq c", "ln2"),
                node("MatMul", "ln2 wk", "key"),
                *attention("key"),
            ]
        ),
        "10.11.0",
        "8.9",
        kernel(dtype="fp32"),
    ),
    "range-of-the-input-fused-through": (
        graph([node("ReduceMin", "x", "lo"), node("ReduceMax", "x", "hi"), node("Sub", "hi lo", "y")]),
        "11.2.1",
        "12.0",
        kernel(),
    ),
    "horizontal-projections-batch-1": (
        None,
        "10.13.3.9",
        "11.0",
        kernel("q/MatMul+k/MatMul+v/MatMul_myl0_3"),
    ),
    "merged-int8-projections-over-fp16": (
        None,
        "10.6.0",
        "9.0",
        replace(kernel("/q/MatMul+/k/MatMul+/v/MatMul_myl0_3"), tactic="sm90_xmma_gemm_i8i8_i8i32_f32_tn_n"),
    ),
}
PLAIN = graph([node("Relu", "x", "y")])


def matched(name, model, version, capability, *kernels):
    found = match_known_issues(Build(version, capability, kernels), model)
    return next((match for match in found if match.issue.id == name), None)


def test_every_issue_has_a_case():
    assert CASES.keys() == {issue.id for issue in known_issues()}


@pytest.mark.parametrize("name", CASES)
def test_it_fits_what_has_it(name):
    model, version, capability, *kernels = CASES[name]
    match = matched(name, model, version, capability, *kernels)
    assert match is not None
    assert match.layers


@pytest.mark.parametrize("name", CASES)
def test_it_does_not_fit_other_versions(name):
    model, _, capability, *kernels = CASES[name]
    for version in ("7.2.3", "10.6.0", "10.9.0", "11.4.0", "12.0.0", "", "unknown"):
        inside = any(v.holds(version) for i in known_issues() if i.id == name for v in i.versions)
        assert (matched(name, model, version, capability, *kernels) is None) is not inside
    assert matched(name, model, "11.4.0", capability, *kernels) is None


@pytest.mark.parametrize("name", CASES)
def test_it_does_not_fit_another_structure(name):
    _, version, capability, *kernels = CASES[name]
    other = [kernel("Relu_1", next(iter(kernels[0].dtypes)))]
    assert matched(name, PLAIN, version, capability, *other) is None
    assert matched(name, None, version, capability, *other) is None


@pytest.mark.parametrize("name", [i.id for i in known_issues() if i.compute_capabilities])
def test_it_does_not_fit_another_gpu(name):
    model, version, _, *kernels = CASES[name]
    assert matched(name, model, version, "5.0", *kernels) is None


@pytest.mark.parametrize("name", [i.id for i in known_issues() if i.formats])
def test_it_does_not_fit_another_format(name):
    model, version, capability, *kernels = CASES[name]
    assert matched(name, model, version, capability, *(kernel(k.name, "fp32") for k in kernels)) is None


def test_merged_projections_that_write_fp16_are_no_fault():
    merged = replace(kernel("/q/MatMul+/k/MatMul+/v/MatMul_myl0_3"), tactic="sm90_xmma_gemm_i8f16_i8i32_f32")
    assert matched("merged-int8-projections-over-fp16", None, "10.6.0", "9.0", merged) is None


def test_equal_cumsums_are_no_fault():
    same = graph([node("CumSum", "x a0", "l"), node("CumSum", "x a0", "y")], [axis("a0", 0)])
    assert matched("cumsum-twice", same, "10.11.0", "8.6", kernel()) is None


def test_an_add_whose_operand_no_concat_reads_is_no_fault():
    plain = graph([*RESIDUAL, node("Relu", "sum", "y")])
    assert matched("strided-concat-under-residual-add", plain, "11.2.1", "12.0", kernel()) is None


def test_patch_embedding_is_no_segformer():
    vit = graph(
        [
            node("Conv", "x w", "patches"),
            node("Reshape", "patches shape", "seq"),
            node("LayerNormalization", "seq c", "ln"),
            node("MatMul", "ln wk", "key"),
            *attention("key"),
        ]
    )
    assert matched("segformer-batch", vit, "10.11.0", "8.9", kernel()) is None


def test_versions_compare_as_far_as_they_are_written():
    versions = Versions.model_validate({"from": "10.8", "to": "10.11"})
    inside = ("10.8", "10.8.0.43", "10.11.9", "10.10")
    assert [versions.holds(v) for v in inside] == [True] * 4
    assert not any(versions.holds(v) for v in ("10.7.9", "10.12", "9.9", "11.0", "", "x.y"))


def test_capabilities_have_one_name():
    assert [capability_name(text) for text in ("8.9", "12.0", "SM89", "")] == ["SM89", "SM120", "SM89", ""]
