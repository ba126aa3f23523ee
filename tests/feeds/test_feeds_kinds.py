"""The other kinds of data: Polygraphy's saved inputs, Python files, random numbers."""

import base64
import io
import json
import re
import tracemalloc

import numpy as np
import pytest
from onnx import TensorProto
from polygraphy.json import save_json

from diag.errors import DataError
from diag.feeds import open_feeds
from diag.feeds.saved_json import batch_places
from diag.model.graph import TensorInfo

X = {"x": TensorInfo(TensorProto.FLOAT, ("n", 2))}
TEXT = {
    "input_ids": TensorInfo(TensorProto.INT64, ("batch", "seq")),
    "attention_mask": TensorInfo(TensorProto.INT64, ("batch", "seq")),
    "token_type_ids": TensorInfo(TensorProto.INT64, ("batch", "seq")),
    "position_ids": TensorInfo(TensorProto.INT64, ("batch", "seq")),
    "image": TensorInfo(TensorProto.FLOAT16, (None, 3, None)),
}


def batch(value):
    return {"x": np.full((1, 2), value, np.float32)}


def refused(spec, message, inputs=X):
    with pytest.raises(DataError) as caught:
        open_feeds(str(spec), inputs)
    assert caught.value.problem == message


# Polygraphy's JSON


def test_saved_inputs_as_polygraphy_writes_them(tmp_path):
    file = tmp_path / "inputs.json"
    save_json([batch(1), batch(2), batch(3)], str(file))
    feeds = open_feeds(str(file), X)
    assert [b["x"].tolist() for b in feeds] == [[[1, 1]], [[2, 2]], [[3, 3]]]
    assert len(feeds) == 3
    assert feeds.label == f"3 batches that Polygraphy saved, from '{file}'"
    assert open_feeds(str(file), X, limit=2).sha256 != feeds.sha256


def test_one_batch_and_a_folder_of_batches(tmp_path):
    for index in (0, 2, 10):
        save_json(batch(index), str(tmp_path / f"{index}.json"))
    assert len(open_feeds(str(tmp_path / "2.json"), X)) == 1
    feeds = open_feeds(str(tmp_path), X)
    assert [float(b["x"][0, 0]) for b in feeds] == [0, 2, 10]
    assert feeds.label == f"3 batches that Polygraphy saved, from the 3 files in '{tmp_path}'"


def test_brackets_and_quotes_in_names_do_not_confuse_the_reader(tmp_path):
    name = 'a "q" {[ \\'
    file = tmp_path / "inputs.json"
    save_json([{name: np.ones(1, np.float32)}] * 2, str(file))
    feeds = open_feeds(str(file), {name: TensorInfo(TensorProto.FLOAT, None)})
    assert [list(b) for b in feeds] == [[name], [name]]


def test_a_saved_file_is_never_held_whole(tmp_path):
    file = tmp_path / "inputs.json"
    shape = (1 << 17, 2)  # 1 MiB a batch
    save_json([{"x": np.full(shape, i, np.float32)} for i in range(32)], str(file))
    feeds = open_feeds(str(file), X)
    tracemalloc.start()
    assert feeds.check_all() == 32
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20, "batches of 1 MiB out of a 43 MiB file"


BROKEN = "'{}' is not a readable JSON file of saved inputs (truncated, or another kind of file)"


@pytest.mark.parametrize("text", ["", "x", "[{", '[{"a": "b', "[}]", "]", '"a"', "12"])
def test_broken_json(tmp_path, text):
    file = tmp_path / "inputs.json"
    file.write_text(text)
    refused(file, BROKEN.format(file))


def test_truncated_saved_inputs(tmp_path):
    file = tmp_path / "inputs.json"
    save_json([batch(1)], str(file))
    for size in range(2, file.stat().st_size - 1, 7):
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(DataError):
            open_feeds(str(file), X)
        assert size


def test_invalid_json_inside_a_batch(tmp_path):
    file = tmp_path / "inputs.json"
    file.write_text("[{x: 1}]")
    with pytest.raises(DataError, match=re.escape(f"'{file}' batch 0 is not valid JSON: ")):
        open_feeds(str(file), X)


def test_empty_list(tmp_path):
    file = tmp_path / "inputs.json"
    file.write_text("[]")
    refused(file, f"there is no batch in the 0 batches that Polygraphy saved, from '{file}'")


def test_saved_outputs_are_not_inputs(tmp_path):
    file = tmp_path / "outputs.json"
    file.write_text(json.dumps({"lst": [], "polygraphy_class": "RunResults"}))
    refused(file, f"'{file}' batch 0 is a saved 'RunResults' of Polygraphy, not inputs")


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ({"tensor": "AAAA", "polygraphy_class": "Tensor"}, "a 'Tensor'"),
        ([1.0, 2.0], "no array"),
        ({"array": 3, "polygraphy_class": "ndarray"}, "a 'ndarray'"),
    ],
)
def test_values_that_are_no_numpy_arrays(tmp_path, value, held):
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps([{"x": value}]))
    where = f"'{file}' batch 0, input 'x',"
    refused(file, f"{where} holds {held} where Polygraphy's NumPy array is expected")


def test_pickle_inside_json_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([None], dtype=object), allow_pickle=True)
    payload = base64.b64encode(buffer.getvalue()).decode()
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps([{"x": {"array": payload, "polygraphy_class": "ndarray"}}]))
    refused(file, f"'{file}' batch 0, input 'x', holds an array that cannot be decoded")


def test_old_markers_of_polygraphy(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.ones((1, 2), np.float32))
    value = {
        "array": base64.b64encode(buffer.getvalue()).decode(),
        "__polygraphy_encoded_ndarray": "polygraphy_serialized_json_type",
    }
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps([{"x": value}]))
    assert open_feeds(str(file), X).first()["x"].tolist() == [[1, 1]]


def test_places_are_where_the_batches_are(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('[ {"a": [1, {"b": 2}]} , {} ]')
    spans = [(p.start, p.end) for p in batch_places(file)]
    assert [file.read_text()[a:b] for a, b in spans] == ['{"a": [1, {"b": 2}]}', "{}"]


# Python files


def script(tmp_path, text, name="load.py"):
    file = tmp_path / name
    file.write_text(text)
    return file


def test_script_is_called_again_for_each_pass(tmp_path):
    file = script(
        tmp_path,
        "import numpy as np\n"
        "def load_data():\n"
        "    for i in range(5):\n"
        "        yield {'x': np.full((1, 2), i, np.float32)}\n",
    )
    feeds = open_feeds(str(file), X)
    assert [float(b["x"][0, 0]) for b in feeds] == [0, 1, 2, 3, 4]
    assert [float(b["x"][0, 0]) for b in feeds] == [0, 1, 2, 3, 4]
    assert len(feeds) == 5
    assert feeds.label == f"5 batches from load_data() in '{file}'"
    three = open_feeds(str(file), X, limit=3)
    assert len(three) == 3
    assert three.sha256 == open_feeds(str(file), X, limit=3).sha256 != feeds.sha256


def test_script_without_end_works_under_a_limit(tmp_path):
    file = script(
        tmp_path, "import itertools\ndef load_data():\n    yield from itertools.repeat({'x': [[1.0, 2.0]]})\n"
    )
    feeds = open_feeds(str(file), X, limit=2)
    assert len(feeds) == len(list(feeds)) == 2


def test_script_may_return_a_list_from_a_function_of_any_name_and_import_its_neighbours(tmp_path):
    script(tmp_path, "VALUE = 7.0\n", "trtdiag_test_neighbour.py")
    file = script(
        tmp_path,
        "from trtdiag_test_neighbour import VALUE\ndef calib():\n    return [{'x': [[VALUE, 0.0]]}]\n",
    )
    feeds = open_feeds(f"{file}:calib", X)
    assert feeds.first()["x"].tolist() == [[7, 0]]
    assert feeds.label == f"1 batch from calib() in '{file}'"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("import numpy\nraise KeyError('k')\n", "{}, line 2: KeyError: 'k'"),
        (
            "def load_data():\n    return helper()\ndef helper():\n    return 1 / 0\n",
            "{}, line 4: ZeroDivisionError: division by zero",
        ),
        ("def load_data():\n    yield {}['q']\n", "{}, line 2: KeyError: 'q'"),
        ("import sys\nsys.exit(3)\n", "{}, line 2: SystemExit: 3"),
        ("def load_data():\n    return 5\n", "{}: TypeError: 'int' object is not iterable"),
        ("def load_data():\n    yield 5\n", "{} batch 0 is a int, not a dict of input name to array"),
        ("x = 1\n", "{} defines no function load_data()"),
        ("def load_data():\n    return []\n", "there is no batch in the 0 batches from load_data() in {}"),
    ],
)
def test_faults_in_the_script_are_named_with_their_line(tmp_path, text, where):
    file = script(tmp_path, text)
    refused(file, where.format(f"'{file}'"))


def test_the_line_is_named_for_a_relative_path_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = script(tmp_path, "def load_data():\n    yield {}['q']\n")
    refused(file.name, f"'{file.name}', line 2: KeyError: 'q'")


def test_syntax_error_in_the_script(tmp_path):
    file = script(tmp_path, "x = 1\ndef load_data(:\n")
    with pytest.raises(DataError, match=re.escape(f"'{file}', line 2: SyntaxError: invalid syntax")):
        open_feeds(str(file), X)


def test_script_that_gives_other_values_each_time_is_refused(tmp_path):
    file = script(
        tmp_path, "n = 0\ndef load_data():\n    global n\n    n += 1\n    yield {'x': [[float(n), 0.0]]}\n"
    )
    feeds = open_feeds(str(file), X)
    with pytest.raises(DataError) as caught:
        list(feeds)
    assert caught.value.problem == (
        f"'{file}' batch 0 differs from the one that an earlier call of load_data() gave"
    )


def test_ragged_values_in_a_script(tmp_path):
    file = script(tmp_path, "def load_data():\n    yield {'x': [[1.0], [1.0, 2.0]]}\n")
    with pytest.raises(DataError, match=re.escape(f"'{file}' batch 0 holds a value that is no array: ")):
        open_feeds(str(file), X)


# Random numbers


def test_random_data_say_so_and_repeat():
    feeds = open_feeds("random:7", TEXT)
    assert (len(feeds), feeds.random, feeds.seed) == (4, True, 7)
    assert feeds.label == (
        "4 batches of RANDOM data, seed 7: they prove little, real inputs may behave otherwise"
    )
    first, again = list(feeds), list(open_feeds("random:7", TEXT))
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(first, again, strict=True) for n in TEXT)
    assert not np.array_equal(first[0]["input_ids"], first[1]["input_ids"])
    assert feeds.sha256 != open_feeds("random:8", TEXT).sha256


def test_random_shapes_types_and_hints():
    (values,) = open_feeds("random:0", TEXT, limit=1)
    assert values["input_ids"].shape == (1, 64)
    assert values["image"].shape == (1, 3, 64)
    assert values["image"].dtype == np.float16
    assert values["input_ids"].min() >= 0 and values["input_ids"].max() <= 99
    assert (values["attention_mask"] == 1).all()
    assert (values["token_type_ids"] == 0).all()
    assert values["position_ids"][0].tolist() == list(range(64))


def test_random_options():
    feeds = open_feeds("random:3:batch=2,seq=16,image.2=5,batches=6", TEXT)
    assert len(feeds) == 6
    assert feeds.shapes()["input_ids"] == (2, 16)
    assert feeds.shapes()["image"] == (1, 3, 5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random", "'random' gives no seed for random data"),
        ("random:", "'random:' gives no seed for random data"),
        ("random:-1", "'random:-1' gives no seed for random data"),
        ("random:1:seq", "'seq' in 'random:1:seq' is not NAME=SIZE with a size of 1 or more"),
        ("random:1:seq=0", "'seq=0' in 'random:1:seq=0' is not NAME=SIZE with a size of 1 or more"),
        ("random:1:sq=4", "'random:1:sq=4' sets 'sq', which is no open dimension of the model's inputs"),
    ],
)
def test_random_spec_faults(spec, message):
    refused(spec, message, TEXT)


def test_random_needs_type_and_rank():
    inputs = {"s": TensorInfo(TensorProto.STRING, (1,))}
    refused("random:0", "random data cannot be made for input 's', whose type or rank is not known", inputs)
