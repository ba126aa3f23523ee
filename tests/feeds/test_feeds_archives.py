"""Folders and files of .npz: order, limits, identity, streaming, and every way in which they can be bad."""

import hashlib
import io
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from diag.errors import DataError, UsageError
from diag.feeds import open_feeds
from diag.model.graph import TensorInfo

INPUTS = {
    "input_ids": TensorInfo(TensorProto.INT64, ("batch", "seq")),
    "attention_mask": TensorInfo(TensorProto.INT64, ("batch", "seq")),
}
IMAGE = {"x": TensorInfo(TensorProto.FLOAT, ("batch", 3, 2, 2))}


def tokens(fill, shape=(2, 4)):
    return {"input_ids": np.full(shape, fill, np.int64), "attention_mask": np.ones(shape, np.int64)}


@pytest.fixture
def folder(tmp_path):
    # Ten and two: natural order puts 2 before 10, text order would not.
    for index in (10, 2, 0):
        np.savez(tmp_path / f"b{index}.npz", **tokens(index))
    return tmp_path


def test_one_file_is_one_batch_in_natural_order(folder):
    feeds = open_feeds(str(folder), INPUTS)
    assert [int(batch["input_ids"][0, 0]) for batch in feeds] == [0, 2, 10]
    assert len(feeds) == 3
    assert feeds.label == f"3 batches, one per file, from the 3 .npz files in '{folder}'"
    assert (feeds.random, feeds.seed) == (False, None)


def test_batches_can_be_read_again_and_come_in_the_models_input_order(folder):
    feeds = open_feeds(str(folder), INPUTS)
    assert len(list(feeds)) == len(list(feeds)) == 3
    assert list(feeds.first()) == ["input_ids", "attention_mask"]
    assert feeds.shapes() == {"input_ids": (2, 4), "attention_mask": (2, 4)}
    assert feeds.check_all() == 3


def test_limit_takes_the_first_batches_and_belongs_to_the_identity(folder):
    two = open_feeds(str(folder), INPUTS, limit=2)
    assert [int(batch["input_ids"][0, 0]) for batch in two] == [0, 2]
    assert len(two) == 2
    assert two.label == f"2 batches, one per file, from the 3 .npz files in '{folder}'"
    assert two.sha256 != open_feeds(str(folder), INPUTS).sha256
    assert len(open_feeds(str(folder), INPUTS, limit=99)) == 3


def test_identity_is_the_hash_of_sorted_names_sizes_and_contents(folder, tmp_path_factory):
    total = hashlib.sha256()
    for name in ("b0.npz", "b10.npz", "b2.npz"):
        content = (folder / name).read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    assert open_feeds(str(folder), INPUTS).sha256 == total.hexdigest()
    elsewhere = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    assert open_feeds(str(elsewhere), INPUTS).sha256 == total.hexdigest()


def test_a_single_file(folder):
    feeds = open_feeds(str(folder / "b2.npz"), INPUTS)
    assert len(feeds) == 1
    assert feeds.label == f"1 batch from '{folder / 'b2.npz'}'"


def test_only_one_batch_is_read_at_a_time(folder):
    """A bad last file is met only when the iteration comes to it."""
    (folder / "b10.npz").write_bytes(b"PK")
    iterator = iter(open_feeds(str(folder), INPUTS))
    next(iterator)
    next(iterator)
    with pytest.raises(DataError, match=r"b10\.npz' is not a readable"):
        next(iterator)


def refused(spec, inputs, message, limit=None):
    with pytest.raises(DataError) as caught:
        open_feeds(str(spec), inputs, limit)
    assert caught.value.problem == message
    assert caught.value.hint
    return caught.value.hint


def test_limit_below_one():
    with pytest.raises(UsageError, match=re.escape("a limit of 0 batches leaves nothing to run.")):
        open_feeds("random:0", INPUTS, limit=0)


def test_missing_path(tmp_path):
    refused(tmp_path / "no.npz", INPUTS, f"data '{tmp_path}/no.npz' do not exist")


def test_unknown_extension(tmp_path):
    (tmp_path / "x.csv").write_text("1,2")
    refused(
        tmp_path / "x.csv",
        INPUTS,
        f"'{tmp_path}/x.csv' is of no kind of data that can be read (.csv)",
    )


def test_empty_folder(tmp_path):
    refused(tmp_path, INPUTS, f"data folder '{tmp_path}' holds no .npz files (nothing)")
    (tmp_path / "notes.txt").write_text("")
    message = f"data folder '{tmp_path}' holds no .npz files (only 'notes.txt' and the like)"
    refused(tmp_path, INPUTS, message)


BROKEN = "'{}' is not a readable .npz archive (truncated, or another kind of file)"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello", b"\x80\x04N."], ids=repr)
def test_not_an_archive(tmp_path, content):
    file = tmp_path / "a.npz"
    file.write_bytes(content)
    refused(file, INPUTS, BROKEN.format(file))


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_truncated_archive(tmp_path, keep):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, x=np.random.default_rng(0).standard_normal((1, 3, 2, 2), np.float32))
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    refused(file, IMAGE, BROKEN.format(file))


def test_archive_member_cut_short(tmp_path):
    """The zip is whole, the array inside is not."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((1, 3, 2, 2), np.float32))
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", buffer.getvalue()[:-8])
    refused(file, IMAGE, BROKEN.format(file))


def test_single_array_under_the_wrong_extension(tmp_path):
    file = tmp_path / "a.npz"
    with file.open("wb") as stream:
        np.save(stream, np.zeros(3))
    refused(file, IMAGE, f"'{file}' holds a single array without a name, not an .npz archive")


class Trap:
    """Leaves a mark when it is unpickled."""

    mark: Path

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("inside", [True, False])
def test_pickles_are_refused_and_never_run(tmp_path, inside):
    Trap.mark = tmp_path / "ran"
    file = tmp_path / "a.npz"
    if inside:
        np.savez(file, x=np.array([Trap()], dtype=object))
    else:
        file.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError):
        open_feeds(str(file), IMAGE)
    assert not Trap.mark.exists()


def test_object_array_sentence(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([None, 1], dtype=object))
    refused(tmp_path / "a.npz", IMAGE, f"'{tmp_path}/a.npz' holds Python objects, which are never loaded")
