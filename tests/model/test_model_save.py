"""Saving: what was loaded comes back, whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_files import floats, linear, model_of, saved
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from diag.errors import OutputError
from diag.files import output_file, output_folder, replacing, write_text
from diag.model import save
from diag.model.graph import Model
from diag.model.load import load_model, make_stub
from diag.model.save import embedded, save_model


def many_types() -> ModelProto:
    arrays = {
        "w": floats((24, 32)),
        "h": floats((900,)).astype(np.float16),
        "b": floats((901,)).astype(ml_dtypes.bfloat16),
        "q": (np.arange(3001) % 16 - 8).astype(ml_dtypes.int4),
        "small": floats((3,)),
    }
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "mm")
    return model_of([node], [numpy_helper.from_array(v, n) for n, v in arrays.items()], opset=21)


def values(path: Path) -> dict[str, bytes]:
    proto = onnx.load(path)
    return {t.name: numpy_helper.to_array(t).tobytes() for t in proto.graph.initializer}


@pytest.fixture(params=[2_000_000_000, 0], ids=["one file", "external data"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(save, "PROTOBUF_LIMIT_BYTES", request.param)
    return int(request.param)


def test_a_round_trip_keeps_every_value(limit: int, tmp_path: Path) -> None:
    source = saved(many_types(), tmp_path, "source.onnx")
    model = load_model(source)
    out = tmp_path / "out"
    out.mkdir()
    save_model(model.proto, model.weights, out / "typed.onnx")
    expected = {"typed.onnx"} if limit else {"typed.onnx", "typed.onnx.data"}
    assert {p.name for p in out.iterdir()} == expected
    assert values(out / "typed.onnx") == values(source)
    again = load_model(out / "typed.onnx")
    assert set(again.weights) == set(model.weights)
    for name, value in model.weights.items():
        assert again.weights[name].tobytes() == value.tobytes()
        assert again.weights[name].dtype == value.dtype
    assert [n.name for n in again.proto.graph.node] == ["mm"]


def test_saving_changes_neither_the_model_nor_its_values(limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    before = model.proto.SerializeToString()
    save_model(model.proto, model.weights, tmp_path / "typed.onnx")
    assert model.proto.SerializeToString() == before
    assert np.array_equal(model.weights["w"], floats((24, 32)))


def test_a_saved_model_computes_the_same(limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    save_model(model.proto, model.weights, tmp_path / "typed.onnx")
    x = floats((2, 24), 5)
    result = ReferenceEvaluator(str(tmp_path / "typed.onnx")).run(None, {"x": x})[0]
    np.testing.assert_allclose(result, x @ floats((24, 32)) + floats((32,), 1), rtol=1e-5, atol=1e-5)


def test_a_view_of_other_memory_order_is_saved_as_its_values(limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    turned = np.asfortranarray(floats((24, 32)))
    save_model(model.proto, {"w": turned}, tmp_path / "typed.onnx")
    assert values(tmp_path / "typed.onnx")["w"] == floats((24, 32)).tobytes()


def test_a_model_may_replace_itself(tmp_path: Path) -> None:
    path = saved(linear(), tmp_path)
    model = load_model(path)
    save_model(model.proto, model.weights, path)
    assert np.array_equal(load_model(path).weights["w"], floats((24, 32)))


def test_an_embedded_model_needs_no_other_file() -> None:
    model = Model("m", *_detached())
    full = embedded(model.proto, model.weights)
    assert np.array_equal(numpy_helper.to_array(full.graph.initializer[0]), floats((24, 32)))


def _detached() -> tuple[ModelProto, dict[str, np.ndarray], str]:
    proto = linear()
    save_values = {"w": floats((24, 32))}
    make_stub(proto.graph.initializer[0])
    return proto, save_values, ""


def full_disk(self: Path, *arguments: object, **options: object) -> object:
    raise OSError(errno.ENOSPC, "No space left on device")


Patch = Callable[[pytest.MonkeyPatch], None]


def no_rename(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "replace", full_disk)


def no_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "open", full_disk)
    patch.setattr(Path, "write_bytes", full_disk)


def no_second_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "write_bytes", full_disk)


def no_second_rename(patch: pytest.MonkeyPatch) -> None:
    """The data take their place; then the model cannot."""
    rename = Path.replace

    def once(self: Path, target: Path) -> Path:
        if target.suffix == ".data":
            return rename(self, target)
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(Path, "replace", once)


def half_written(patch: pytest.MonkeyPatch) -> None:
    """Some bytes arrive before the disk is full."""
    write = Path.write_bytes

    def some(self: Path, data: bytes) -> int:
        write(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(Path, "write_bytes", some)


@pytest.mark.parametrize("fault", [no_rename, no_open, no_second_file, no_second_rename, half_written])
@pytest.mark.parametrize("before", [False, True], ids=["new", "over an older one"])
def test_a_full_disk_leaves_what_was_there(fault: Patch, before: bool, limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    out = tmp_path / "out"
    out.mkdir()
    if before:
        (out / "typed.onnx").write_bytes(b"older")
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(OutputError) as caught:
            save_model(model.proto, model.weights, out / "typed.onnx")
    assert str(caught.value).startswith(f"'{out}/typed.onnx")
    assert "cannot be written: No space left on device. Check the folder and the free space." in str(
        caught.value
    )
    assert caught.value.exit_code == 3
    assert {p.name: p.read_bytes() for p in out.iterdir()} == ({"typed.onnx": b"older"} if before else {})


def test_a_folder_that_is_not_there(limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        save_model(model.proto, model.weights, tmp_path / "no" / "typed.onnx")


def test_a_file_where_a_folder_should_be(limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        save_model(model.proto, model.weights, tmp_path / "source.onnx" / "typed.onnx")


def test_a_folder_where_the_file_should_be(limit: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(), tmp_path, "source.onnx"))
    (tmp_path / "out.onnx").mkdir()
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        save_model(model.proto, model.weights, tmp_path / "out.onnx")
    assert {p.name for p in tmp_path.iterdir()} == {"source.onnx", "out.onnx"}


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: File name too long"):
        write_text("x", tmp_path / ("n" * 300))


def test_an_interrupted_block_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("older")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("new")
        raise KeyboardInterrupt
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.txt": "older"}


def test_text_is_utf8(tmp_path: Path) -> None:
    write_text("ß → 128 ≥ 127", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_bytes().decode("utf-8") == "ß → 128 ≥ 127"


def test_output_folders_are_made_and_left_clean(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []
    assert output_folder(folder) == folder
    assert output_file(folder / "c" / "f.html") == folder / "c" / "f.html"
    assert (folder / "c").is_dir()


def test_output_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"output folder '.*/file' cannot be written") as caught:
        output_folder(tmp_path / "file")
    assert caught.value.exit_code == 3
    with pytest.raises(
        OutputError, match=r"output folder '.*/file/deeper' cannot be written: Not a directory"
    ):
        output_folder(tmp_path / "file" / "deeper")


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        output_folder(tmp_path)
