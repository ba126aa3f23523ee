"""The judge of the peers of searches: what is FP32 in a typed model; overflow that kernels on a CPU hide."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.search_judge import Judge, in_fp16, is_square, kept_high

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


def rms_norm(kind=FLOAT, square_kind=None):
    """x / sqrt(mean(x^2)), all of one type but for the square, whose neighbours are cast."""
    square_kind = square_kind or kind
    dtype = helper.tensor_dtype_to_np_dtype
    wide = square_kind != kind
    nodes = [
        helper.make_node("Cast", ["x"], ["start"], "/start", to=kind),
        *([helper.make_node("Cast", ["start"], ["up"], "/up", to=square_kind)] if wide else []),
        helper.make_node("Pow", ["up" if wide else "start", "two"], ["square"], "/norm/Pow"),
        helper.make_node("ReduceMean", ["square"], ["mean"], "/norm/ReduceMean", axes=[-1]),
        helper.make_node("Add", ["mean", "eps"], ["guarded"], "/norm/Add"),
        helper.make_node("Sqrt", ["guarded"], ["root"], "/norm/Sqrt"),
        *([helper.make_node("Cast", ["root"], ["down"], "/down", to=kind)] if wide else []),
        helper.make_node("Div", ["start", "down" if wide else "root"], ["unit"], "/norm/Div"),
        helper.make_node("Mul", ["unit", "gain"], ["scaled"], "/norm/Mul"),
        helper.make_node("Cast", ["scaled"], ["y"], "/end", to=FLOAT),
    ]
    weights = [
        numpy_helper.from_array(np.asarray(2, dtype(square_kind)), "two"),
        numpy_helper.from_array(np.asarray(1e-5, dtype(square_kind)), "eps"),
        numpy_helper.from_array(np.ones(8, dtype(kind)), "gain"),
    ]
    graph = helper.make_graph(
        nodes,
        "norm",
        [helper.make_tensor_value_info("x", FLOAT, ("n", 8))],
        [helper.make_tensor_value_info("y", FLOAT, ("n", 8))],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.fixture
def files(tmp_path):
    """The norm in FP32, in FP16, in FP16 with its square in FP32; and a batch whose squares pass 65504."""
    models = {"fp32": rms_norm(), "fp16": rms_norm(FLOAT16), "mended": rms_norm(FLOAT16, FLOAT)}
    for name, model in models.items():
        onnx.checker.check_model(model)
        onnx.save(model, tmp_path / f"{name}.onnx")
    (tmp_path / "batches").mkdir()
    x = np.random.default_rng(0).normal(0, 1, (4, 8)).astype(np.float32)
    np.savez(tmp_path / "batches" / "0.npz", x=x)
    np.savez(tmp_path / "batches" / "1.npz", x=300 * x)
    return SimpleNamespace(batches=tmp_path / "batches", **{n: tmp_path / f"{n}.onnx" for n in models})


def test_overflow_in_fp16_is_seen(files):
    judge = Judge(files.fp32, files.batches, "values")
    lost, mended = (judge.metrics(judge.emulated(model)) for model in (files.fp16, files.mended))
    assert lost["sqnr_db"] < 10  # rows of the second batch became x / inf = 0
    assert mended["sqnr_db"] > 50
    assert judge.metrics(judge.references)["sqnr_db"] == np.inf


def test_norms_that_overflow_and_nodes_kept_in_fp32(files):
    judge, planned = Judge(files.fp32, files.batches, "values"), in_fp16(files.fp32)
    assert judge.overflowing(planned) == {"/norm/Pow"}
    assert is_square(planned, "/norm/Pow")
    assert not is_square(planned, "/norm/Sqrt")
    assert kept_high(planned, files.fp16) == []
    assert sorted(kept_high(planned, files.mended)) == [
        "/norm/Add",
        "/norm/Pow",
        "/norm/ReduceMean",
        "/norm/Sqrt",
    ]
    quiet = files.batches / "1.npz"
    quiet.unlink()
    assert Judge(files.fp32, files.batches, "values").overflowing(planned) == set()
