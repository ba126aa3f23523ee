"""Files that are no model, or once were: one clear sentence, never a traceback."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from model_files import branch, linear, model_of, saved
from onnx import ModelProto, TensorProto, helper, numpy_helper

from diag.errors import ModelError
from diag.model import shapes
from diag.model.load import load_model, make_stub


def rich() -> ModelProto:
    """A model with every kind of field that loading looks at."""
    proto = linear()
    nodes = [
        helper.make_node("ReduceMax", ["y"], ["s"], keepdims=0),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node(
            "If",
            ["k"],
            ["i"],
            then_branch=branch("c", helper.make_node("Constant", [], ["c"], value_float=1.0)),
            else_branch=branch("d", helper.make_node("Identity", ["s"], ["d"])),
        ),
        helper.make_node("f", ["i"], ["z"], domain="my"),
    ]
    body = [helper.make_node("Relu", ["p"], ["q"])]
    proto.functions.append(helper.make_function("my", "f", ["p"], ["q"], body, [helper.make_opsetid("", 18)]))
    proto.opset_import.append(helper.make_opsetid("my", 1))
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(helper.make_tensor("t", TensorProto.FLOAT16, [4], np.zeros(4)))
    return proto


def use(path: Path) -> bool:
    """Load a file and look at all of it. True when it is a model, False when it is refused in a sentence."""
    try:
        model = load_model(path)
        assert model.value_dependent | set(model.consumers) | set(model.outputs) | set(model.inputs)
        for name in [*model.initializers, *model.producers]:
            model.constant(name)
        shapes.infer(model, {"N": 2})
    except ModelError as error:
        assert error.problem
        assert "\n" not in error.problem.split(": ")[0]
        assert error.exit_code == 2
        return False
    return True


def test_the_whole_file_is_a_model(tmp_path: Path) -> None:
    assert use(saved(rich(), tmp_path))


def test_a_file_cut_off_anywhere_is_refused_or_loads(tmp_path: Path) -> None:
    data = rich().SerializeToString()
    rng = np.random.default_rng(0)
    cuts = {*range(64), *range(len(data) - 64, len(data)), *map(int, rng.integers(0, len(data), 150))}
    path = tmp_path / "m.onnx"
    refused = 0
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        refused += not use(path)
    assert refused > 0.9 * len(cuts)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_are_refused_or_load(seed: int, tmp_path: Path) -> None:
    data = rich().SerializeToString()
    raw = data.index(linear().graph.initializer[0].raw_data)
    graph = [i for i in range(len(data)) if not raw <= i < raw + 3072]  # values may be anything
    rng = np.random.default_rng(seed)
    path = tmp_path / "m.onnx"
    kinds = set()
    for _ in range(150):
        damaged = bytearray(data)
        for position in rng.choice(graph, rng.integers(1, 5)):
            damaged[position] = rng.integers(256)
        path.write_bytes(damaged)
        kinds.add(use(path))
    assert kinds == {True, False}


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\x02\0\0\0" + zlib.compress(bytes(500))


@pytest.mark.parametrize(
    "content",
    [
        b"Hello, this is no model.\n" * 50,
        PNG,
        b"\0" * 4096,
        b"PK\x03\x04" + bytes(200),
        b"version https://git-lfs",
    ],
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value).startswith(
        (f"{str(path)!r} is not a readable ONNX model (trunc", f"{str(path)!r} holds no ONNX graph. Give")
    )
    assert caught.value.exit_code == 2


def test_nothing_there_a_folder_and_an_empty_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    for path, sentence in (
        (
            tmp_path / "no.onnx",
            f"model file '{tmp_path}/no.onnx' does not exist. Give the path of an ONNX file.",
        ),
        (tmp_path, f"'{tmp_path}' is a folder. Give the path of the ONNX file in it."),
        (empty, f"'{empty}' is empty. Export or copy it again."),
    ):
        with pytest.raises(ModelError) as caught:
            load_model(path)
        assert str(caught.value) == sentence


def test_a_file_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(ModelError, match=r"m\.onnx' cannot be read: Permission denied"):
        load_model(tmp_path / "m.onnx")


def test_a_model_without_nodes_or_outputs_holds_no_graph(tmp_path: Path) -> None:
    for field in ("node", "output"):
        proto = linear()
        proto.graph.ClearField(field)
        with pytest.raises(ModelError, match="holds no ONNX graph"):
            load_model(saved(proto, tmp_path))


def damaged_tensor(**changes: object) -> ModelProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[24, 32], raw_data=bytes(3072))
    for key, value in changes.items():
        if key == "dims":
            tensor.dims[:] = value  # type: ignore[assignment]
        else:
            setattr(tensor, key, value)
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"], "mm")], [tensor])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dims": [24, 33]}, "tensor 'w' holds 3072 bytes where its shape needs 3168. The model is damaged"),
        ({"dims": [2**40, 2**40]}, f"tensor 'w' holds 3072 bytes where its shape needs {2**82}"),
        ({"dims": [24, -32]}, "tensor 'w' has the negative shape (24, -32)"),
        ({"data_type": 99}, "tensor 'w' has the unknown element type 99"),
        ({"data_type": 0}, "tensor 'w' has the unknown element type 0"),
        ({"raw_data": bytes(12)}, "tensor 'w' holds 12 bytes where its shape needs 3072"),
        ({"raw_data": bytes(12), "dims": [4]}, "tensor 'w' holds 12 bytes where its shape needs 16"),
        ({"raw_data": bytes(4000), "dims": [4]}, "tensor 'w' holds 4000 bytes where its shape needs 16"),
        ({"data_type": TensorProto.STRING}, "tensor 'w' holds 3072 bytes where its shape needs"),
    ],
)
def test_values_that_do_not_fit(changes: dict[str, object], sentence: str, tmp_path: Path) -> None:
    path = saved(damaged_tensor(**changes), tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value).startswith(sentence)


def test_typed_values_that_do_not_fit(tmp_path: Path) -> None:
    for count in (500, 4):  # taken out of the graph at once, or decoded when asked for
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[count], float_data=[0.0, 1.0])
        path = saved(model_of([helper.make_node("Mul", ["x", "w"], ["y"])], [tensor]), tmp_path)
        with pytest.raises(ModelError, match="'w' is malformed"):
            load_model(path).constant("w")


def test_a_constant_node_without_a_value(tmp_path: Path) -> None:
    nodes = [helper.make_node("Constant", [], ["k"]), helper.make_node("Mul", ["x", "k"], ["y"])]
    model = load_model(saved(model_of(nodes), tmp_path))
    with pytest.raises(
        ModelError, match=r"constant 'k' is malformed: .* The model is damaged; export it again"
    ):
        model.constant("k")


def test_a_model_saved_without_its_values_says_so(tmp_path: Path) -> None:
    proto = linear()
    make_stub(proto.graph.initializer[0])
    path = saved(proto, tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value) == f"{str(path)!r} was saved without the values of 'w'. Export the model again."


def test_names_that_are_no_text(tmp_path: Path) -> None:
    data = linear().SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(data.replace(b"\x1a\x02mm", b"\x1a\x02\xff\xfe"))
    assert path.read_bytes() != data
    with pytest.raises(ModelError, match=r"m\.onnx' is damaged: "):
        load_model(path)
