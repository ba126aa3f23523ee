"""Nodes named in the user's own code, from what PyTorch's exporters leave on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import model_of, saved
from onnx import NodeProto, helper

from diag.model.load import load_model
from diag.model.source import Source, source_of

EXPORTED = json.loads((Path(__file__).parent / "torch_metadata.json").read_text())["nodes"]
"""Nodes of a real export: two blocks, `attention.py` holds the attention, `exp.py` the rest."""


def node_with(metadata: dict[str, str], op_type: str = "Relu", name: str = "n") -> NodeProto:
    node = helper.make_node(op_type, ["x"], ["y"], name)
    for key, value in metadata.items():
        node.metadata_props.add(key=key, value=value)
    return node


@pytest.mark.parametrize(
    ("name", "text", "class_name"),
    [
        ("node_matmul_2", "model.layers.1.attn, attention.py:13", "Attention"),
        ("node_softmax_1", "model.layers.1.attn, attention.py:14", "Attention"),
        # Modules of torch's own: the line is the one that calls them, not torch/nn/modules/linear.py:134.
        ("node_MatMul_6", "model.layers.1.attn.q, attention.py:13", "Linear"),
        ("node_layer_norm_1", "model.layers.1.attn.norm, attention.py:12", "LayerNorm"),
        ("node_gelu_1", "model.layers.1.act, exp.py:6", "GELU"),
        ("node_sum_1", "exp.py:16", "Top"),
    ],
)
def test_a_node_of_torchs_exporter_is_named_in_the_users_code(name: str, text: str, class_name: str) -> None:
    (entry,) = [e for e in EXPORTED if e["name"] == name]
    source = source_of(node_with(entry["metadata"]))
    assert source is not None
    assert str(source) == text
    assert source.class_name == class_name


def test_the_source_survives_loading(tmp_path: Path) -> None:
    entry = EXPORTED[0]
    model = load_model(saved(model_of([node_with(entry["metadata"])]), tmp_path))
    assert model.layers[0].source == source_of(node_with(entry["metadata"]))
    assert model.layers[0].source is not None


STACK = 'File "{}", line 7, in forward\n    x\n  File "{}", line 21, in forward\n    return y'


@pytest.mark.parametrize(
    ("innermost", "line"),
    [
        ("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 7),
        ("/usr/lib/python3/dist-packages/torch/functional.py", 7),
        ("/src/pytorch/torch/nn/functional.py", 7),
        ("C:\\venv\\Lib\\site-packages\\torch\\nn\\modules\\conv.py", 7),
        ("/venv/lib/python3.12/site-packages/transformers/models/bert/modeling_bert.py", 21),
        ("/home/user/torchish/attention.py", 21),
        ("/home/user/torch/attention.py", 21),
    ],
)
def test_only_torchs_own_frames_are_passed_over(innermost: str, line: int) -> None:
    stack = STACK.format("/home/user/model.py", innermost)
    source = source_of(node_with({"pkg.torch.onnx.stack_trace": stack}))
    assert source is not None
    assert source.line == line


def test_a_stack_that_is_all_torchs_still_says_where() -> None:
    place = "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py"
    source = source_of(node_with({"pkg.torch.onnx.stack_trace": f'File "{place}", line 3, in forward'}))
    assert str(source) == "linear.py:3"


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"something": "else"},
        {"pkg.torch.onnx.name_scopes": ""},
        {"pkg.torch.onnx.name_scopes": "['', 'op']"},
        {"pkg.torch.onnx.name_scopes": "__import__('os').getcwd()"},
        {"pkg.torch.onnx.name_scopes": "[" * 500},
        {"pkg.torch.onnx.name_scopes": "{'a': 1}"},
        {"pkg.torch.onnx.stack_trace": "no frame"},
    ],
)
def test_without_anything_usable_there_is_no_source(metadata: dict[str, str]) -> None:
    assert source_of(node_with(metadata)) is None


def test_a_module_alone_and_a_line_alone() -> None:
    scopes = {"pkg.torch.onnx.name_scopes": "['', 'model', 'model.head', 'linear']"}
    assert source_of(node_with(scopes)) == Source("model.head")
    assert str(Source("model.head")) == "model.head"
    assert str(Source("", "", "/a/b/net.py", 3)) == "net.py:3"
