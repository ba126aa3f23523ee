"""Q/DQ models of other tools taken apart: plan, table and float model give the same numbers again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from foreign_models import FLOAT, batch, build, cnn, quantized_by_ort, run_plainly
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from diag.model.load import from_proto
from diag.typed.brought import dequantized, find_quantizers

SAMPLES = Path(__file__).parent / "samples"


def apart(trtdiag, model, out):
    ended = trtdiag("inspect", model, "--out", out, "--json")
    assert ended.code == 0, ended.err
    files = {"plan.yaml", "table.json", "fp32.onnx", "report.json", "report.html"}
    assert {path.name for path in out.iterdir()} == files
    return ended.json


def together(trtdiag, out, typed):
    words = ("--plan", out / "plan.yaml", "--calibration", out / "table.json", "--out", typed)
    ended = trtdiag("convert", out / "fp32.onnx", *words)
    assert ended.code == 0, ended.err
    return typed


def unsaid(report):
    return [f["title"] for f in report["findings"] if f["id"].startswith("unsaid")]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_onnx_runtimes_symmetric_models_bit_for_bit(trtdiag, tmp_path, kind, per_channel):
    _, qdq = quantized_by_ort(tmp_path, kind, per_channel=per_channel, symmetric=True)
    report = apart(trtdiag, qdq, tmp_path / "o")
    assert unsaid(report) == []
    typed = together(trtdiag, tmp_path / "o", tmp_path / "typed.onnx")
    assert not [n for n in onnx.load(typed).graph.node if "relu/" in n.name]
    x = batch(kind, 99)
    np.testing.assert_array_equal(run_plainly(typed, x), run_plainly(qdq, x))
    assert np.any(run_plainly(tmp_path / "o" / "fp32.onnx", x) != run_plainly(qdq, x))


@pytest.mark.parametrize("name", ["modelopt_mlp_int8", "modelopt_mlp_fp8", "modelopt_cnn_int8"])
def test_modelopts_models_bit_for_bit(trtdiag, tmp_path, name):
    model = SAMPLES / f"{name}.onnx"
    report = apart(trtdiag, model, tmp_path / "o")
    assert not [f for f in report["findings"] if f["severity"] == "error"]
    typed = together(trtdiag, tmp_path / "o", tmp_path / "typed.onnx")
    x = batch(name.split("_")[1], 99)
    np.testing.assert_array_equal(run_plainly(typed, x), run_plainly(model, x))
    assert np.any(run_plainly(tmp_path / "o" / "fp32.onnx", x) != run_plainly(model, x))


def constants(path):
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_a_model_in_fp16_becomes_fp32_under_a_plan_with_an_fp16_base(trtdiag, tmp_path):
    """Scales and codes come back bit for bit; ONNX Runtime rounds FP16 chains on a CPU as it likes."""
    model = SAMPLES / "modelopt_mlp_int8_fp16.onnx"
    report = apart(trtdiag, model, tmp_path / "o")
    assert (report["plan"]["base"], unsaid(report)) == ("fp16", [])
    below = onnx.load(tmp_path / "o" / "fp32.onnx").graph
    assert {t.data_type for t in below.initializer} == {TensorProto.FLOAT}
    typed = together(trtdiag, tmp_path / "o", tmp_path / "typed.onnx")
    given, made = constants(model), constants(typed)
    for name in ("w1", "w2"):
        scale = given[f"{name}_scale_1"]
        np.testing.assert_array_equal(made[f"{name}/int8/scale"], scale)
        codes = np.rint(given[name].astype(np.float32) / scale.astype(np.float32))
        np.testing.assert_array_equal(made[f"{name}/int8"], codes)
    for tensor in ("x", "r1", "a2"):
        label = "x/fp16" if tensor == "x" else tensor
        assert made[f"{label}/int8/scale"] == given[f"{tensor}_scale_1"]
    x = batch("mlp", 99)
    typed_out, given_out, float_out = (
        run_plainly(p, x) for p in (typed, model, tmp_path / "o" / "fp32.onnx")
    )
    assert np.linalg.norm(typed_out - given_out) < 0.3 * np.linalg.norm(float_out - given_out)


def test_block_wise_weights_keep_their_values(trtdiag, tmp_path):
    model = SAMPLES / "modelopt_mlp_int4.onnx"
    report = apart(trtdiag, model, tmp_path / "o")
    assert "layers with quantized weights alone" in unsaid(report)[0]
    x = batch("mlp", 99)
    np.testing.assert_array_equal(run_plainly(tmp_path / "o" / "fp32.onnx", x), run_plainly(model, x))


@pytest.mark.parametrize("scale", [np.float32(0.05), np.array([0.02, 0.05, 0.1], np.float32)])
def test_weights_behind_a_transpose(trtdiag, tmp_path, scale):
    """Per tensor the steps come along; by channel they are min-max's, and it says so."""
    codes = np.random.default_rng(0).integers(-90, 91, size=(3, 4)).astype(np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"),
        helper.make_node("DequantizeLinear", ["c", "cs", "cz"], ["w"], "w", axis=0),
        helper.make_node("Transpose", ["w"], ["t"], "t"),
        helper.make_node("MatMul", ["d", "t"], ["y"], "layer"),
    ]
    values = {
        "c": codes,
        "cs": scale,
        "cz": np.zeros(scale.shape, np.int8),
        "s": np.float32(0.1),
        "z": np.int8(0),
    }
    model = build(tmp_path / "m.onnx", nodes, values, [2, 4])
    report = apart(trtdiag, model, tmp_path / "o")
    assert bool(unsaid(report)) == bool(scale.ndim)
    typed = together(trtdiag, tmp_path / "o", tmp_path / "typed.onnx")
    x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    if scale.ndim:
        assert "by output channel" in unsaid(report)[0]
        np.testing.assert_allclose(run_plainly(typed, x), run_plainly(model, x), atol=0.2)
    else:
        np.testing.assert_array_equal(run_plainly(typed, x), run_plainly(model, x))


def test_a_model_that_keeps_float_weights_gets_them_back(trtdiag, tmp_path):
    apart(trtdiag, SAMPLES / "modelopt_mlp_int8.onnx", tmp_path / "o")
    kept = {
        t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "o" / "fp32.onnx").graph.initializer
    }
    given = onnx.load(SAMPLES / "modelopt_mlp_int8.onnx").graph.initializer
    weights = {t.name: numpy_helper.to_array(t) for t in given if t.name in ("w1", "w2")}
    assert len(weights) == 2
    for name, values in weights.items():
        np.testing.assert_array_equal(kept[name], values)


@pytest.mark.parametrize(("kind", "relus"), [("cnn", 2), ("mlp", 1)])
def test_unsigned_models_keep_what_their_zero_points_do(trtdiag, tmp_path, kind, relus):
    """ONNX Runtime leaves Relus out where a zero point of 0 cuts negative values off anyway."""
    fp32, qdq = quantized_by_ort(tmp_path, kind, per_channel=True, symmetric=False)
    report = apart(trtdiag, qdq, tmp_path / "o")
    graph = onnx.load(tmp_path / "o" / "fp32.onnx").graph
    assert sum(n.name.startswith("trtdiag/relu") for n in graph.node) == relus
    assert not {"QuantizeLinear", "DequantizeLinear"} & {n.op_type for n in graph.node}
    x = batch(kind, 99)
    reference, below = run_plainly(fp32, x), run_plainly(tmp_path / "o" / "fp32.onnx", x)
    assert np.linalg.norm(below - reference) < 0.03 * np.linalg.norm(reference)  # INT8 weights
    assert any("that are not symmetric" in title for title in unsaid(report))
    typed = run_plainly(together(trtdiag, tmp_path / "o", tmp_path / "typed.onnx"), x)
    assert np.linalg.norm(typed - reference) < 0.1 * np.linalg.norm(reference)


def test_the_files_tell_where_they_come_from(trtdiag, tmp_path):
    _, qdq = quantized_by_ort(tmp_path, "mlp", per_channel=True, symmetric=True)
    report = apart(trtdiag, qdq, tmp_path / "o")
    assert report["run"]["engine"] == "Q/DQ model of onnx.quantize, read and not run"
    assert report["plan"]["default"] == "int8"
    assert report["verdict"].startswith("Q/DQ model with 18 quantizers; layers quantized: 12 in int8")
    assert {layer["format"] for layer in report["layers"]} == {"int8"}
    page = (tmp_path / "o" / "report.html").read_text()
    assert "TensorRT does not read" in page


SCALES = np.array([0.5, 0.25, 2.0], np.float32)


@pytest.mark.parametrize(
    ("codes", "scale", "zero_point", "attributes"),
    [
        (np.int8, np.float32(0.1), np.int8(0), {}),
        (np.uint8, np.float32(0.1), np.uint8(7), {}),
        (np.int8, SCALES, np.zeros(3, np.int8), {"axis": 0}),
        (np.int8, SCALES[:2], np.array([1, -3], np.int8), {"axis": -1}),
        (np.int32, SCALES, np.zeros(3, np.int32), {"axis": 0}),
        (np.int8, np.arange(1, 5, dtype=np.float32).reshape(2, 2), None, {"axis": 0, "block_size": 2}),
    ],
)
def test_stored_codes_mean_what_onnx_says(codes, scale, zero_point, attributes):
    values = np.random.default_rng(0).integers(0, 100, size=(3, 2)).astype(codes)
    constants = {"c": values, "s": scale} | ({} if zero_point is None else {"z": zero_point})
    nodes = [helper.make_node("DequantizeLinear", list(constants), ["y"], "d", **attributes)]
    graph = helper.make_graph(
        nodes, "g", [], [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (quantizer,) = find_quantizers(from_proto(proto))
    (expected,) = ReferenceEvaluator(proto).run(None, {})
    np.testing.assert_array_equal(dequantized(values, quantizer), expected)


def refused(trtdiag, model, tmp_path):
    ended = trtdiag("inspect", model, "--out", tmp_path / "o")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("trtdiag: error: ")
    return ended.err


def test_a_float_model_has_nothing_to_inspect(trtdiag, tmp_path):
    assert "without DequantizeLinear" in refused(trtdiag, cnn(tmp_path / "m.onnx"), tmp_path)


QUANTIZED = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q")
STEPS = {"s": np.float32(0.1), "z": np.int8(0)}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            [
                helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s0", "z0"], "dynamic"),
                helper.make_node("DequantizeLinear", ["q", "s0", "z0"], ["y"], "d"),
            ],
            "'dynamic' (DynamicQuantizeLinear) computes on codes",
        ),
        (
            [
                QUANTIZED,
                helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"),
                helper.make_node("Cast", ["q"], ["c"], "cast", to=TensorProto.FLOAT),
                helper.make_node("Add", ["c", "d"], ["y"], "add"),
            ],
            "'q' are read by more than a DequantizeLinear",
        ),
        (
            [
                helper.make_node("ReduceMax", ["x"], ["top"], "top", keepdims=0),
                helper.make_node("QuantizeLinear", ["x", "top", "z"], ["q"], "q"),
                helper.make_node("DequantizeLinear", ["q", "top", "z"], ["y"], "d"),
            ],
            "the scale of 'd' is computed",
        ),
    ],
)
def test_models_that_cannot_be_taken_apart(trtdiag, tmp_path, nodes, said):
    assert said in refused(trtdiag, build(tmp_path / "m.onnx", nodes, STEPS, [2, 3]), tmp_path)
    assert not (tmp_path / "o" / "fp32.onnx").exists()


def test_options_that_mean_nothing_here(trtdiag, tmp_path):
    ended = trtdiag("inspect", SAMPLES / "modelopt_mlp_int8.onnx", "--format", "int8")
    assert ended.code == 2
    assert "is read as it is" in ended.err


@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf])
@pytest.mark.parametrize("of", ["activation", "weight"])
def test_scales_that_are_none(trtdiag, tmp_path, of, scale):
    """The report names them, the table leaves them out, and nothing is converted with them in silence."""
    steps = {"activation": np.float32(0.1), "weight": np.full(4, 0.1, np.float32)}
    steps[of] = (steps[of] * 0 + np.float32(scale)).astype(np.float32)
    nodes = [QUANTIZED]
    nodes.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"))
    nodes.append(helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"], "wq", axis=1))
    nodes.append(helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], "wd", axis=1))
    nodes.append(helper.make_node("MatMul", ["d", "wd"], ["y"], "layer"))
    values = {"w": np.eye(3, 4, dtype=np.float32), "wz": np.zeros(4, np.int8), "z": np.int8(0)}
    values |= {"s": steps["activation"], "ws": steps["weight"]}
    report = apart(trtdiag, build(tmp_path / "m.onnx", nodes, values, [2, 3]), tmp_path / "o")
    assert any("not positive and finite" in title for title in unsaid(report))
    errors = [f["layers"] for f in report["findings"] if f["severity"] == "error"]
    assert errors == [["d" if of == "activation" else "wd"]]
    if of == "activation":
        words = ("--plan", tmp_path / "o" / "plan.yaml", "--calibration", tmp_path / "o" / "table.json")
        ended = trtdiag("convert", tmp_path / "o" / "fp32.onnx", *words, "--out", tmp_path / "typed.onnx")
        assert ended.code == 2
        assert "'x'" in ended.err


def test_what_only_some_read_quantized(trtdiag, tmp_path):
    """x is quantized for one side of an Add, r twice with other steps, d2 for half of a layer."""
    steps = {f"s{i}": np.float32(0.1 + 0.05 * i) for i in range(4)} | {"z": np.int8(0)}

    def pair(source, number):
        parameters = [f"s{number}", "z"]
        return [
            helper.make_node("QuantizeLinear", [source, *parameters], [f"q{number}"], f"q{number}"),
            helper.make_node("DequantizeLinear", [f"q{number}", *parameters], [f"d{number}"], f"dq{number}"),
        ]

    nodes = [
        *pair("x", 0),
        helper.make_node("Add", ["d0", "x"], ["a"], "one_sided"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        *pair("r", 1),
        *pair("d1", 2),
        helper.make_node("MatMul", ["d2", "w"], ["m"], "half"),
        *pair("m", 3),
        helper.make_node("Identity", ["d3"], ["y"], "end"),
    ]
    values = steps | {"w": np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)}
    model = build(tmp_path / "m.onnx", nodes, values, [2, 3])
    report = apart(trtdiag, model, tmp_path / "o")
    assert unsaid(report) == []
    typed = together(trtdiag, tmp_path / "o", tmp_path / "typed.onnx")
    x = np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run_plainly(typed, x), run_plainly(model, x))
