"""Bad input: one clear sentence that says what to do, exit 2 or 3, no traceback, nothing half written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.graphs import bert, llama

PLAN = "schema: trtdiag.plan/1\ndefault: int8\n"


def refused(ended, code: int, *said: str) -> str:
    """The sentence; checked to be one line on standard error, and all there is."""
    assert ended.code == code, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert lines, "nothing was said"
    assert all(line.startswith("trtdiag: ") for line in lines)
    assert [line for line in lines if line.startswith("trtdiag: error: ")] == [lines[-1]]
    assert "Traceback" not in ended.err
    for part in said:
        assert part in lines[-1]
    return lines[-1]


@pytest.fixture
def compare(trtdiag, model, data, tmp_path):
    """`trtdiag compare` with what a test changes; afterwards the output folder is empty, or not there."""
    out = tmp_path / "results"

    def run(*more: object, model=model, data=data, plan=("--format", "int8"), out=out):
        return trtdiag("compare", model, *plan, "--data", data, "--out", out, *more)

    yield run
    assert not out.exists() or list(out.iterdir()) == []


@pytest.fixture
def plan(tmp_path):
    """Writes a plan; the words that give it to the command."""

    def write(text: str) -> tuple[str, Path]:
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return "--plan", path

    return write


@pytest.fixture
def npz(tmp_path):
    """Writes one batch into a folder of data."""

    def write(**arrays) -> Path:
        folder = tmp_path / "bad"
        folder.mkdir(exist_ok=True)
        np.savez(folder / "0.npz", **arrays)
        return folder

    return write


# The model.


def test_missing_model(compare, tmp_path):
    refused(compare(model=tmp_path / "no.onnx"), 2, "no.onnx", "does not exist")


def test_model_that_is_a_folder(compare, model):
    refused(compare(model=model.parent), 2, "is a folder", "Give the path of the ONNX file")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
def test_truncated_model(compare, model, tmp_path, share):
    cut = tmp_path / "cut.onnx"
    whole = model.read_bytes()
    cut.write_bytes(whole[: int(len(whole) * share)])
    refused(compare(model=cut), 2, "cut.onnx")


@pytest.mark.parametrize("content", [b"", b"hello world\n" * 99, b"PK\x03\x04" + bytes(99), b"\x89PNG\r\n"])
def test_not_an_onnx_file(compare, tmp_path, content):
    other = tmp_path / "other.onnx"
    other.write_bytes(content)
    refused(compare(model=other), 2, "other.onnx", "Export or copy it again")


@pytest.fixture
def external(model, tmp_path):
    """The model with its weights in `weights.bin` beside it."""
    path = tmp_path / "external" / "model.onnx"
    path.parent.mkdir()
    onnx.save(onnx.load(model), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    return path


def test_external_data_work(trtdiag, external, data, tmp_path):
    words = ("compare", external, "--format", "fp16", "--data", data, "--out", tmp_path / "o", "--quiet")
    assert trtdiag(*words).code == 0


def test_missing_external_data(compare, external):
    external.with_name("weights.bin").unlink()
    refused(compare(model=external), 2, "weights.bin", "is missing", "Copy it beside the model")


def test_short_external_data(compare, external):
    weights = external.with_name("weights.bin")
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(compare(model=external), 2, "weights.bin")


def test_external_data_outside_the_folder(compare, external, tmp_path):
    shutil.move(external.with_name("weights.bin"), tmp_path / "weights.bin")
    proto = onnx.load(external, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.bin"
    external.write_bytes(proto.SerializeToString())
    refused(compare(model=external), 2, "weights.bin")


@pytest.fixture
def foreign(tmp_path):
    """A model whose last node is an operator that only its author can run."""
    proto = onnx.ModelProto()
    proto.CopyFrom(bert().model)
    last = proto.graph.node[-1]
    name = last.output[0]
    last.output[0] = "before"
    proto.graph.node.append(helper.make_node("Secret", ["before"], [name], "the/secret", domain="acme"))
    proto.opset_import.append(helper.make_opsetid("acme", 1))
    path = tmp_path / "foreign.onnx"
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_an_operator_that_cannot_run_is_named(compare, foreign, more):
    refused(compare(*more, model=foreign), 3, "ONNX Runtime", "acme:Secret")


def test_calibrating_an_operator_that_cannot_run(trtdiag, foreign, data, tmp_path):
    ended = trtdiag("calibrate", foreign, "--data", data, "--out", tmp_path / "table.json")
    refused(ended, 3, "acme:Secret")
    assert not (tmp_path / "table.json").exists()


# The data.


def test_missing_data(compare, tmp_path):
    refused(compare(data=tmp_path / "none"), 2, "do not exist", "random:SEED")


def test_empty_data_folder(compare, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(compare(data=tmp_path / "empty"), 2, "holds no .npz files")


def test_truncated_data(compare, data, tmp_path):
    cut = tmp_path / "cut.npz"
    cut.write_bytes((data / "0.npz").read_bytes()[:200])
    refused(compare(data=cut), 2, "cut.npz")


def test_data_with_a_wrong_name(compare, npz):
    batch = bert().batch()
    said = refused(compare(data=npz(input_idz=batch["input_ids"], attention_mask=batch["attention_mask"])), 2)
    assert "Rename 'input_idz' to 'input_ids'" in said


def test_data_with_a_superfluous_name(compare, npz):
    refused(compare(data=npz(**bert().batch(), labels=np.zeros(2))), 2, "'labels'", "no input of the model")


def test_data_of_a_wrong_shape(compare, npz):
    batch = bert().batch()
    refused(compare(data=npz(**{**batch, "input_ids": batch["input_ids"][0]})), 2, "(12)", "(batch, seq)")


def test_data_of_a_wrong_type(compare, npz):
    batch = bert().batch()
    wrong = npz(**{**batch, "input_ids": batch["input_ids"].astype(np.float32)})
    refused(compare(data=wrong), 2, "'input_ids'", "float32", "int64")


def test_token_outside_the_embedding(compare, npz):
    """ONNX Runtime refuses it while it runs: an engine's failure, in one sentence."""
    batch = bert().batch()
    refused(compare(data=npz(**{**batch, "input_ids": batch["input_ids"] + 10**6})), 3, "ONNX Runtime")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_data_that_are_not_finite_in_a_late_batch(compare, image_model, tmp_path, bad, more):
    folder = shutil.copytree(image_model.parent / "data", tmp_path / "late")
    with np.load(folder / "2.npz") as archive:
        batch = {name: archive[name].copy() for name in archive.files}
    batch["image"][1, 2, 3, 4] = bad
    np.savez(folder / "2.npz", **batch)
    ended = compare(*more, model=image_model, data=folder)
    refused(ended, 2, "2.npz", f"holds {bad} at (1, 2, 3, 4)", "'image'")


# The plan and the options.


def test_plan_with_an_unknown_key(compare, plan):
    refused(compare(plan=plan(PLAN + "pinz: []\n")), 2, "line 3", "'pinz'", "'pins'")


def test_pin_that_matches_nothing(compare, plan):
    given = plan(PLAN + "pins: [{match: /block.0/pv_matmul/MatMul_37, format: fp16}]\n")
    refused(compare(plan=given), 2, "matches no layer", "/block.0/pv_matmul/MatMul_36")


def test_missing_plan(compare, tmp_path):
    refused(compare(plan=("--plan", tmp_path / "no.yaml")), 2, "no.yaml", "cannot be read")


def test_plan_and_format(compare, plan):
    refused(compare(plan=(*plan(PLAN), "--format", "int8")), 2, "either --plan PLAN or --format FORMAT")


def test_neither_plan_nor_format(compare):
    refused(compare(plan=()), 2, "either --plan PLAN or --format FORMAT")


@pytest.mark.parametrize("name", ["int9", "", "FP16", "float16"])
def test_unknown_format(compare, name):
    refused(compare(plan=("--format", name)), 2, f"{name!r}")


@pytest.mark.parametrize("name", ["tensorrrt", "", "onnxruntime"])
def test_unknown_engine(compare, name):
    refused(compare("--engine", name), 2, f"no engine {name!r}", "emulate")


def test_unknown_option(compare):
    refused(compare("--frob"), 2, "No such option: --frob", "trtdiag compare --help")


def test_unknown_command(trtdiag):
    refused(trtdiag("comprae"), 2, "No such command 'comprae'", "trtdiag --help")


@pytest.mark.parametrize(
    "words", [("--limit", "0"), ("--limit", "-1"), ("--limit", "x"), ("--slice-mb", "0")]
)
def test_numbers_that_make_no_sense(compare, words):
    refused(compare(*words), 2)


@pytest.mark.parametrize("name", ["compare", "calibrate", "convert", "gate", "report", "demo"])
def test_missing_arguments(trtdiag, name):
    refused(trtdiag(name), 2, "Missing", f"trtdiag {name} --help")


def test_no_command_shows_the_help(trtdiag):
    ended = trtdiag()
    assert (ended.code, ended.err) == (2, "")
    assert "Usage: trtdiag" in ended.out


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("sqnr>=30", "sqnr_db"),
        ("sqnr_db=30", "METRIC OP NUMBER"),
        ("sqnr_db>=many", "no number"),
        ("logits:sqnr_db>=30", "last_hidden_state"),
        ("", "METRIC OP NUMBER"),
    ],
)
def test_impossible_threshold_is_refused_before_the_run(compare, monkeypatch, check, said):
    def begin(*_):
        raise AssertionError("the long run began")

    monkeypatch.setattr("diag.pipeline.compare.job.examine", begin)
    monkeypatch.setattr("diag.pipeline.compare.job.calibrate", begin)
    refused(compare("--fail-under", check), 2, said)
    refused(compare("--fail-under", check, "--dry-run"), 2, said)


# The calibration table.


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_table_of_another_model(trtdiag, compare, tmp_path, more):
    fixture = llama()
    onnx.save(fixture.model, tmp_path / "llama.onnx")
    np.savez(tmp_path / "llama.npz", **fixture.batch())
    other = tmp_path / "llama.json"
    words = ("calibrate", tmp_path / "llama.onnx", "--data", tmp_path / "llama.npz", "--out", other)
    assert trtdiag(*words).code == 0
    refused(compare("--calibration", other, *more), 2, "another model", "trtdiag calibrate")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_table(compare, table, tmp_path, share):
    cut = tmp_path / "cut.json"
    whole = table.read_text()
    cut.write_text(whole[: int(len(whole) * share)])
    refused(compare("--calibration", cut), 2, "cut.json", "is not JSON", "Was it cut off?")


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(extra=1),
        lambda table: table.update(schema="trtdiag.calibration/9"),
        lambda table: table.pop("model_sha256"),
        lambda table: table["tensors"].update(x={"absmax": -1, "minimum": 0, "maximum": 0, "elements": 1}),
        lambda table: table["tensors"].update(x={"absmax": "NaN", "minimum": 0, "maximum": 0, "elements": 1}),
    ],
)
def test_table_that_breaks_its_schema(compare, table, tmp_path, change):
    values = json.loads(table.read_text())
    change(values)
    (tmp_path / "bad.json").write_text(json.dumps(values))
    refused(compare("--calibration", tmp_path / "bad.json"), 2, "bad.json", "is not a trtdiag.calibration/1")


def test_table_that_lacks_a_tensor(compare, table, tmp_path):
    values = json.loads(table.read_text())
    name, _ = values["tensors"].popitem()
    (tmp_path / "less.json").write_text(json.dumps(values))
    refused(compare("--calibration", tmp_path / "less.json"), 2, "lacks 1 of", name, "Calibrate again")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b"3", b"[]", b"null"])
def test_table_of_another_kind(compare, tmp_path, content):
    (tmp_path / "odd.json").write_bytes(content)
    refused(compare("--calibration", tmp_path / "odd.json"), 2, "odd.json")


def test_missing_table(compare, tmp_path):
    refused(compare("--calibration", tmp_path / "no.json"), 2, "no.json", "No such file")


def test_int8_without_scales_cannot_be_converted(trtdiag, model, tmp_path):
    ended = trtdiag("convert", model, "--format", "int8", "--out", tmp_path / "t.onnx")
    refused(ended, 2, "--calibration TABLE")
    assert not (tmp_path / "t.onnx").exists()


# Where results go.


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "--format", "fp16"),
        ("calibrate", "--data", "DATA"),
        ("profile", "--data", "DATA"),
        ("build", "--format", "fp16", "--data", "DATA", "--engine", "tensorrt-rtx"),
    ],
    ids=lambda words: words[0],
)
def test_a_result_never_replaces_the_model_that_it_is_made_from(trtdiag, model, data, words):
    before = model.read_bytes()
    rest = [data if word == "DATA" else word for word in words[1:]]
    refused(trtdiag(words[0], model, *rest, "--out", model), 2, "would replace", model.name)
    assert model.read_bytes() == before


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_output_folder_that_cannot_be_made(compare, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    refused(compare(out=tmp_path / place), 3, place, "cannot be written")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["calibrate", "convert", "report"])
@pytest.mark.parametrize("place", ["file/result", "folder"])
def test_output_file_that_cannot_be_written(trtdiag, model, data, report, tmp_path, name, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    words = {
        "calibrate": ("calibrate", model, "--data", data),
        "convert": ("convert", model, "--format", "fp16"),
        "report": ("report", report),
    }[name]
    said = refused(trtdiag(*words, "--out", tmp_path / place), 3)
    assert "calibrating" not in said
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"


# Reports.


@pytest.mark.parametrize("name", ["gate", "report"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b"\xff\xfe", b'{"schema": "trtdiag.report/9"}'])
def test_report_that_cannot_be_read(trtdiag, tmp_path, name, content):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    more = ("--fail-under", "cosine>=0.9") if name == "gate" else ("--out", tmp_path / "page.html")
    refused(trtdiag(name, path, *more), 2, "broken.json")
    assert not (tmp_path / "page.html").exists()


# Errors as JSON.


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("compare", "no.onnx", "--format", "int8", "--data", "random:0", "--out", "o", "--json"), 2),
        (("compare", "--json"), 2),
        (("doctor", "--frob", "--json"), 2),
        (("gate", "no.json", "--fail-under", "cosine>=1", "--json"), 2),
    ],
)
def test_errors_are_one_json_object_too(trtdiag, tmp_path, monkeypatch, words, code):
    monkeypatch.chdir(tmp_path)
    ended = trtdiag(*words)
    assert ended.code == code
    error = ended.json["error"]
    assert error.keys() == {"problem", "hint", "exit_code"}
    assert error["exit_code"] == code
    assert error["problem"]
    assert error["hint"] or "no.json" in error["problem"]
    assert ended.err.count("\n") == 1


def test_an_engines_failure_as_json(trtdiag, foreign, data, tmp_path):
    words = ("compare", foreign, "--format", "fp16", "--data", data, "--out", tmp_path / "o", "--json")
    ended = trtdiag(*words)
    assert ended.code == ended.json["error"]["exit_code"] == 3
    assert "acme:Secret" in ended.json["error"]["problem"]


def test_a_model_with_nothing_to_quantize(trtdiag, tmp_path):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "relu.onnx")
    ended = trtdiag("calibrate", tmp_path / "relu.onnx", "--data", "random:0", "--out", tmp_path / "t.json")
    refused(ended, 2, "no Conv, ConvTranspose, MatMul or Gemm")
