"""Every schema of kernel lists, and what is no kernel list."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.errors import DataError
from diag.kernels.inspector import kernels_from_json, nodes_in
from diag.kernels.kernel import dtype_of
from diag.kernels.read import detect_source, read_kernels, with_times
from diag.kernels.verbose_log import kernels_from_log

SAMPLES = Path(__file__).parent / "samples"

OLD_CONV = {
    "Name": "conv1.weight + QuantizeLinear_8 + Conv_12 + PWN(Clip_16)",
    "LayerType": "CaskConvolution",
    "Inputs": [
        {
            "Name": "x",
            "Location": "Device",
            "Dimensions": [1, 3, 8, 8],
            "Format/Datatype": "Four wide channel vectorized row major Int8 format",
        }
    ],
    "Outputs": [{"Name": "y", "Dimensions": [1, 4, 8, 8], "Format/Datatype": "Row major linear FP32"}],
    "Weights": {"Type": "Int8", "Count": 108},
    "Constants": {},
    "TacticName": "sm75_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32",
}

NEW_GEMM = {
    "Name": "/fc/MatMul_myl0_3",
    "LayerType": "gemm",
    "Inputs": [
        {
            "Name": "x",
            "Dimensions": [-1, 64],
            "Strides": [64, 1],
            "Datatype": "BFloat16",
            "Format": "(Linear) Row",
        }
    ],
    "Constants": [{"Name": "w", "Dimensions": [64, 32], "Datatype": "BFloat16", "Format": "(Linear) Row"}],
    "Outputs": [{"Name": "y", "Dimensions": [-1, 32], "Datatype": "FP8", "Format": "(Linear) Row"}],
    "TacticName": "",
    "StreamId": 2,
    "Metadata": "[ONNX Layer: /fc/MatMul]\x1e[ONNX Layer: /fc/Add[0]]\x1f[ONNX Layer: /q]",
}


def read(data: Any) -> Any:
    return kernels_from_json(json.dumps(data), "file 'x'")


def test_trex_era_has_no_metadata_and_joins_the_nodes_names() -> None:
    (kernel,) = read({"Layers": [OLD_CONV], "Bindings": ["x", "y"]})
    assert kernel.nodes == ("conv1.weight", "QuantizeLinear_8", "Conv_12", "Clip_16")
    assert [(t.dtype, t.constant) for t in kernel.inputs] == [("int8", False), ("int8", True)]
    assert kernel.outputs[0].dtype == "fp32"
    assert kernel.multiplies
    assert (kernel.accumulator, kernel.math_type) == ("int32", "int8")


def test_a_bare_list_of_layers_is_read_too() -> None:
    assert read([OLD_CONV]) == read({"Layers": [OLD_CONV]})


def test_tensorrt_11_keeps_datatype_and_format_apart() -> None:
    (kernel,) = read({"Layers": [NEW_GEMM], "I/O Tensors": [{"Name": "x"}, {"Name": "y"}]})
    assert [(t.name, t.dims, t.dtype, t.format, t.constant) for t in kernel.inputs] == [
        ("x", (-1, 64), "bf16", "(Linear) Row", False),
        ("w", (64, 32), "bf16", "(Linear) Row", True),
    ]
    assert kernel.outputs[0].dtype == "fp8"
    assert kernel.nodes == ("/fc/MatMul", "/fc/Add[0]", "/q")
    assert kernel.stream == 2
    assert kernel.accumulator == ""


def test_foreign_regions_and_copies_name_no_nodes() -> None:
    names = ["{ForeignNode[/a.../b]}", "Reformatting CopyNode for Input Tensor 0 to /a"]
    kernels = read([{"Name": name, "LayerType": "Reformat"} for name in names])
    assert [k.nodes for k in kernels] == [(), ()]


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("Float", "fp32"),
        ("Half", "fp16"),
        ("BFloat16", "bf16"),
        ("BF16", "bf16"),
        ("FP8", "fp8"),
        ("Int4", "int4"),
        ("Bool", "bool"),
        ("DataType.HALF", "fp16"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("Thirty-two wide channel vectorized row major Int8 format", "int8"),
        ("Row major linear FP32", "fp32"),
        ("Unknown format", ""),
        ("", ""),
    ],
)
def test_words_for_types(text: str, ours: str) -> None:
    assert dtype_of(text) == ours


def test_names_with_brackets_and_commas_survive() -> None:
    assert nodes_in("[ONNX Layer: a[0].b, c]\x1f[ONNX Layer: d][ONNX Layer: a[0].b, c]") == ("a[0].b, c", "d")
    assert nodes_in("") == ()


def test_log_with_awkward_names() -> None:
    line = (
        "Name: f(x, y), LayerType: kgen, Inputs: [ { Name: a, b: [c], Dimensions: [], Datatype: Half, "
        "Format: (Linear) Row major }], Constants: [], Outputs: [], TacticName: t, StreamId: 1, "
        "Metadata: [ONNX Layer: q[1]]"
    )
    (kernel,) = kernels_from_log(["noise", "[05/05/2026-10:00:00] [V] Layers:", line, "", "tail"], "log")
    assert kernel.name == "f(x, y)"
    assert [(t.name, t.dims, t.dtype) for t in kernel.inputs] == [("a, b: [c]", (), "fp16")]
    assert kernel.nodes == ("q[1]",)
    assert (kernel.tactic, kernel.stream) == ("t", 1)


def test_the_last_engine_of_a_log_counts() -> None:
    line = "Name: {}, LayerType: kgen, Inputs: [], Outputs: [], TacticName: , StreamId: 0, Metadata: "
    log = ["[VERBOSE] Layers:", line.format("old"), "", "[VERBOSE] Layers:", line.format("new"), ""]
    assert [k.name for k in kernels_from_log(log, "log")] == ["new"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ('{"Layers": [{"Name": "a", ', "not complete JSON"),
        ('{"nodes": []}', "not an engine inspector's file"),
        ("[1, 2]", "no layer"),
        ('{"Layers": []}', "lists no layers"),
        ('{"Layers": ["a", "b"]}', "only the layers' names"),
        ("[VERBOSE] hello\n[INFO] there\n", "lists no layers"),
        ("[VERBOSE] Layers:\nName: a, LayerType: kge", "ends inside its list"),
        ("[VERBOSE] Layers:\nName: a, LayerType: kge\n\n", "cannot be read"),
        ("some prose", "neither an engine"),
        ("\x00\x01\x02", "neither an engine"),
        ("TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "calibration cache"),
        ("ftrt\x00\x00", "neither a build log"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files_get_one_sentence(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels"
    file.write_text(content)
    with pytest.raises(DataError, match=says):
        read_kernels(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_kernels(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_kernels(tmp_path)


@pytest.mark.parametrize(
    ("head", "source"),
    [
        (b"ftrt\x00", "engine"),
        (b"vtrt\x00", "engine"),
        (b"TRT-8601-EntropyCalibration2\n", "cache"),
        (b"\xef\xbb\xbf{}", "inspector"),
        (b"[\n {}]", "inspector"),
        (b"[11/30/2026-18:13:09] [I] === Model Options ===", "log"),
        (b"&&&& RUNNING TensorRT.trtexec", "log"),
        (b"my build\nLayers:\nName: a", "log"),
        (b"\x08\x08\x12\x07pytorch", "onnx"),
    ],
)
def test_kinds_of_files_are_told_by_content(head: bytes, source: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(head)
    assert detect_source(file) == source


def test_an_engine_is_read_through_what_lies_beside_it(tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"ftrt")
    line = "Name: a, LayerType: kgen, Inputs: [], Outputs: [], TacticName: , StreamId: 0, Metadata: "
    (tmp_path / "m.engine.build.log").write_text(f"[VERBOSE] Layers:\n{line}\n\n")
    assert [k.name for k in read_kernels(engine)] == ["a"]
    (tmp_path / "m.engine.inspector.json").write_text(json.dumps({"Layers": [NEW_GEMM]}))
    assert [k.name for k in read_kernels(engine)] == ["/fc/MatMul_myl0_3"]


def test_times_of_an_exported_profile(tmp_path: Path) -> None:
    profile = tmp_path / "times.json"
    rows = [{"count": 3}, {"name": "/fc/MatMul_myl0_3", "timeMs": 3.0, "averageMs": 0.5, "percentage": 100.0}]
    profile.write_text(json.dumps(rows))
    kernels = with_times(read([NEW_GEMM, OLD_CONV]), profile)
    assert [k.time_ms for k in kernels] == [0.5, None]
    profile.write_text('[{"count": 3}]')
    with pytest.raises(DataError, match="no kernel times"):
        with_times(kernels, profile)


@given(st.data())
def test_a_truncated_list_is_never_taken_for_a_shorter_one(data: st.DataObject) -> None:
    for name, read_text in (
        ("minilm_int8_inspector.json", lambda text: kernels_from_json(text, "file")),
        ("minilm_fp16_verbose_tail.log", lambda text: kernels_from_log(text.splitlines(), "file")),
    ):
        text = (SAMPLES / name).read_text()
        last = text.rindex("Metadata")
        cut = data.draw(st.integers(0, last))
        with pytest.raises(DataError):
            read_text(text[:cut])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Layers", "Name", "Inputs", "Outputs", "Metadata", "Dimensions", "Weights", "StreamId"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(JSON)
def test_any_json_gives_kernels_or_one_sentence(value: Any) -> None:
    with contextlib.suppress(DataError):
        kernels_from_json(json.dumps(value), "file")
