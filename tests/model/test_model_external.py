"""External data: read from where it lies, never outside the model's folder, and part of the model's hash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_files import branch, floats, linear, model_of, saved, saved_outside
from onnx import ModelProto, TensorProto, helper, numpy_helper

from diag.errors import ModelError
from diag.model.load import load_model


@pytest.mark.parametrize("one_file", [True, False])
def test_values_in_one_file_or_in_many(one_file: bool, tmp_path: Path) -> None:
    model = load_model(saved_outside(linear(), tmp_path, one_file))
    assert np.array_equal(model.weights["w"], floats((24, 32)))
    assert not model.weights["w"].flags.owndata
    assert list(model.weights) == ["w"]  # a small one comes into the graph, where shape inference can read it
    assert np.array_equal(model.constant("b"), floats((32,), 1))  # type: ignore[arg-type]
    assert [layer.id for layer in model.layers] == ["mm", "add"]


def outside(folder: Path, location: str = "d.bin", **entries: object) -> Path:
    """`linear` with w in an external file of 96 bytes, then its 3072, then 32 more."""
    (folder / "d.bin").write_bytes(bytes(96) + floats((24, 32)).tobytes() + bytes(32))
    proto = linear()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": 96, "length": 3072, **entries}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return saved(proto, folder)


@pytest.mark.parametrize("entries", [{}, {"length": None}, {"length": 0}, {"checksum": "abc"}])
def test_offsets_are_honoured_with_and_without_a_length(entries: dict[str, object], tmp_path: Path) -> None:
    assert np.array_equal(load_model(outside(tmp_path, **entries)).weights["w"], floats((24, 32)))


def test_a_subfolder_is_inside(tmp_path: Path) -> None:
    path = outside(tmp_path, "sub/../sub/d.bin")
    (tmp_path / "sub").mkdir()
    (tmp_path / "d.bin").rename(tmp_path / "sub" / "d.bin")
    assert np.array_equal(load_model(path).weights["w"], floats((24, 32)))


def test_a_relative_model_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "w" in load_model("m.onnx").weights


def test_empty_tensors_may_have_an_empty_file(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.zeros((0, 3), np.float32), "w")
    path = saved_outside(model_of([helper.make_node("Identity", ["x"], ["y"])], [tensor]), tmp_path)
    if not (tmp_path / "weights.bin").exists():
        (tmp_path / "weights.bin").write_bytes(b"")
    value = load_model(path).constant("w")
    assert value is not None
    assert value.shape == (0, 3)


@pytest.mark.parametrize("location", ["../d.bin", "sub/../../d.bin", "/etc/hostname", "", "link.bin", "loop"])
def test_paths_that_leave_the_folder_are_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "d.bin").write_bytes(bytes(4000))
    (folder / "link.bin").symlink_to(tmp_path / "d.bin")
    (folder / "loop").symlink_to("loop")
    path = outside(folder, location)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    if location != "loop":  # newer Pythons resolve a loop to itself, which is no file
        assert str(caught.value).startswith(
            f"tensor 'w' keeps its values in {location!r}, outside the model's folder. Such a model is"
        )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("location", ["d\0.bin", "x" * 5000])
def test_names_that_no_file_can_have_are_refused(location: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(outside(tmp_path, location))


def test_a_link_that_stays_inside_is_followed(tmp_path: Path) -> None:
    path = outside(tmp_path, "link.bin")
    (tmp_path / "link.bin").symlink_to("d.bin")
    assert np.array_equal(load_model(path).weights["w"], floats((24, 32)))


def test_a_sibling_folder_with_the_same_beginning_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model2").mkdir()
    (tmp_path / "model2" / "d.bin").write_bytes(bytes(4000))
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(outside(tmp_path / "model", "../model2/d.bin"))


def test_missing_data(tmp_path: Path) -> None:
    path = outside(tmp_path)
    (tmp_path / "d.bin").unlink()
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value) == (
        f"external data file 'd.bin' of tensor 'w' is missing from {tmp_path}. Copy it beside the model."
    )


@pytest.mark.parametrize("size", [0, 95, 96, 3167])
def test_data_cut_off(size: int, tmp_path: Path) -> None:
    path = outside(tmp_path)
    with (tmp_path / "d.bin").open("r+b") as stream:
        stream.truncate(size)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value).startswith(
        "external data file 'd.bin' ends before tensor 'w'. The file is truncated"
    )


def test_data_that_just_suffice(tmp_path: Path) -> None:
    path = outside(tmp_path)
    with (tmp_path / "d.bin").open("r+b") as stream:
        stream.truncate(96 + 3072)
    assert "w" in load_model(path).weights


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"offset": "ninety"}, "tensor 'w' has an offset or length that is no number. The model is damaged"),
        ({"length": "1e3"}, "tensor 'w' has an offset or length that is no number"),
        ({"offset": -1}, "tensor 'w' has a negative offset or length"),
        ({"length": -8}, "tensor 'w' has a negative offset or length"),
        ({"length": 3068}, "tensor 'w' holds 3068 bytes where its shape needs 3072"),
        ({"offset": 2**70}, "external data file 'd.bin' ends before tensor 'w'"),
    ],
)
def test_entries_that_make_no_sense(entries: dict[str, object], sentence: str, tmp_path: Path) -> None:
    path = outside(tmp_path, **entries)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value).startswith(sentence)


def test_data_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = outside(tmp_path)
    opened = Path.open

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        if self.name == "d.bin":
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"d\.bin' cannot be read: Permission denied"):
        load_model(path)


def test_the_hash_covers_every_byte_of_the_tensors_and_no_other(tmp_path: Path) -> None:
    path = outside(tmp_path)
    before = load_model(path).sha256
    data = (tmp_path / "d.bin").read_bytes()
    for position, is_tensor in [(96, True), (96 + 1500, True), (96 + 3071, True), (95, False), (3168, False)]:
        changed = bytearray(data)
        changed[position] ^= 1
        (tmp_path / "d.bin").write_bytes(changed)
        assert (load_model(path).sha256 != before) is is_tensor, position
    (tmp_path / "d.bin").write_bytes(data)
    assert load_model(path).sha256 == before


def external_inside() -> ModelProto:
    """Large values in a branch's initializers and in Constant nodes, in the graph and in a branch."""
    weights = [numpy_helper.from_array(floats((24,), seed), name) for seed, name in enumerate("abcd")]
    deep = helper.make_node("Constant", [], ["kb"], value=weights[1])
    then = branch("t", helper.make_node("Add", ["x", "a"], ["t"]), initializers=[weights[0]])
    other = branch("e", deep, helper.make_node("Mul", ["x", "kb"], ["e"]))
    nodes = [
        helper.make_node("Constant", [], ["kc"], "constant", value=weights[2]),
        helper.make_node("If", ["flag"], ["h"], "choice", then_branch=then, else_branch=other),
        helper.make_node("Sub", ["h", "kc"], ["y"], "sub"),
    ]
    return model_of(nodes, [numpy_helper.from_array(np.array(True), "flag")])


def test_values_of_branches_and_attributes_come_into_the_graph(tmp_path: Path) -> None:
    path = saved_outside(external_inside(), tmp_path)
    on_disk = onnx.load(path, load_external_data=False)
    assert (
        on_disk.graph.node[0].attribute[0].t.data_location == TensorProto.EXTERNAL
    )  # the test tests something
    model = load_model(path)
    assert np.array_equal(model.constant("kc"), floats((24,), 2))  # type: ignore[arg-type]
    branches = {a.name: a.g for a in model.proto.graph.node[1].attribute}
    initializer = branches["then_branch"].initializer[0]
    assert np.array_equal(numpy_helper.to_array(initializer), floats((24,), 0))
    attribute = branches["else_branch"].node[0].attribute[0].t
    assert np.array_equal(numpy_helper.to_array(attribute), floats((24,), 1))


def test_the_hash_covers_values_of_branches(tmp_path: Path) -> None:
    path = saved_outside(external_inside(), tmp_path)
    before = load_model(path).sha256
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[data.index(floats((24,), 1).tobytes()) + 5] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)
    assert load_model(path).sha256 != before


def test_a_branch_cannot_read_outside_the_folder_either(tmp_path: Path) -> None:
    proto = external_inside()
    tensor = proto.graph.node[1].attribute[0].g.node[0].attribute[0].t
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").write_bytes(bytes(96))
    with pytest.raises(ModelError, match=r"keeps its values in '\.\./secret', outside the model's folder"):
        load_model(saved(proto, tmp_path / "model"))
