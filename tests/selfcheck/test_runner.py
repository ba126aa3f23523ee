"""What of the runners can be shown without a GPU: refusals, times, TF32's rounding."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.engines.gpu import Gpu
from diag.engines.latency import summarise
from diag.engines.runner import OnnxRuntimeRunner, TensorRtRunner, refuse_elsewhere
from diag.engines.stamp import Identity, Stamp, sha256_of, write_stamp
from diag.engines.tf32 import emulate_tf32
from diag.errors import EngineError
from diag.model import shapes
from diag.model.graph import Model
from diag.numerics.formats import round_tf32
from diag.typed.types import complete

H200 = (Gpu("NVIDIA H200", "9.0", "143771 MiB", "580"),)


def stamp(**changes: object) -> Stamp:
    values = {"flavour": "tensorrt", "version": "10.6.0", "compute_capability": "9.0", "gpu": "NVIDIA H200"}
    return Stamp("", Identity(), **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("built", "version", "gpus", "problem"),
    [
        ({}, "10.6.0", (), "no NVIDIA GPU is here"),
        ({}, "10.7.0", H200, "tensorrt 10.6.0 built it, 10.7.0 is installed"),
        ({"compute_capability": "8.9"}, "10.6.0", H200, "for compute capability 8.9, NVIDIA H200 has 9.0"),
        ({"compute_capability": "SM89"}, "10.6.0", H200, "for compute capability 8.9"),
        ({"gpu": "NVIDIA H100"}, "10.6.0", H200, "it was built on NVIDIA H100, here is NVIDIA H200"),
    ],
)
def test_an_engine_of_elsewhere_is_refused_in_one_sentence(
    built: dict[str, object], version: str, gpus: tuple[Gpu, ...], problem: str
) -> None:
    with pytest.raises(EngineError, match=problem) as caught:
        refuse_elsewhere(stamp(**built), version, gpus)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "built",
    [
        {},
        {"flags": {"VERSION_COMPATIBLE": "on"}, "version": "10.5.0"},
        {"compute_capability": "SM90", "flavour": "tensorrt-rtx", "gpu": ""},
        {"compute_capability": "CURRENT", "flavour": "tensorrt-rtx", "gpu": "another"},
    ],
)
def test_an_engine_of_here_is_not(built: dict[str, object]) -> None:
    refuse_elsewhere(stamp(**built), "10.6.0", H200)


def test_a_changed_engine_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"ftrt")
    with pytest.raises(EngineError, match="has no stamp"):
        TensorRtRunner(engine)
    write_stamp(engine, stamp(version="10.6.0"))
    with pytest.raises(EngineError, match="changed since it was stamped"):
        TensorRtRunner(engine)
    write_stamp(engine, Stamp(sha256_of(engine), Identity("a" * 64), "tensorrt", "10.6.0"))
    with pytest.raises(EngineError, match="built from another model"):
        TensorRtRunner(engine, Identity("b" * 64))


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(1)
    hits, low_ranks = 0, 0
    for _ in range(600):
        times = [generator.expovariate(1.0) for _ in range(51)]
        found = summarise(times, 10)
        assert found.median_ms == median(times)
        hits += found.low_ms <= 0.6931 <= found.high_ms
        low_ranks += found.low_ms > min(times)
    assert 0.93 <= hits / 600 <= 1.0
    assert low_ranks == 600  # and it is narrower than the range


@pytest.mark.parametrize("times", [[2.0], [1.0, 3.0], [5.0, 1.0, 3.0]])
def test_few_times_give_the_whole_range(times: list[float]) -> None:
    found = summarise(times)
    assert (found.low_ms, found.high_ms, found.runs) == (min(times), max(times), len(times))


def test_no_time_is_no_latency() -> None:
    with pytest.raises(ValueError, match="no time"):
        summarise([])


def test_tf32_keeps_ten_bits_of_mantissa() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    rounded = round_tf32(values)
    assert not (rounded.view(np.uint32) & 0x1FFF).any()
    assert np.abs(rounded / values - 1).max() <= 2.0**-11
    exact = np.array([0.0, -1.5, 1024.0, np.inf, -np.inf, 1 + 2.0**-10], np.float32)
    assert np.array_equal(round_tf32(exact), exact)
    assert np.isnan(round_tf32(np.array([np.nan], np.float32))).all()
    assert round_tf32(np.array(1 + 2.0**-11, np.float32)) == np.float32(1 + 2.0**-10)  # a tie


def test_tf32_of_a_matmul_is_the_rounded_operands_product() -> None:
    """Operands of N(0,1), K = 512: relative L2 of 2.9e-4, whatever the length (faults.md, R28)."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 512)).astype(np.float32)
    w = rng.standard_normal((512, 512)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "fed"),
        helper.make_node("MatMul", ["a", "w"], ["b"], "computed"),
        helper.make_node("Relu", ["b"], ["y"], "relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 512])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "y")],
        [numpy_helper.from_array(w, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = Model("m", proto, {}, "")
    emulated = OnnxRuntimeRunner(emulate_tf32(model, complete(shapes.infer(model), model)))
    got = emulated.run({"x": x})
    expected = round_tf32(x).astype(np.float64) @ round_tf32(w)
    assert np.abs(got["a"] - expected).max() <= 1e-5 * np.abs(expected).max()
    second = round_tf32(got["a"]).astype(np.float64) @ round_tf32(w)
    # Veltkamp's split rounds ties, one value in ten thousand, to the other side than adding half a step does.
    assert np.abs(got["y"] - np.maximum(second, 0)).max() <= 1e-4 * np.abs(second).max()
    plain = x.astype(np.float64) @ w
    rel_l2 = np.linalg.norm(got["a"] - plain) / np.linalg.norm(plain)
    assert 2.5e-4 < rel_l2 < 3.3e-4


def test_a_closed_session_says_so() -> None:
    node = helper.make_node("Relu", ["x"], ["y"], "r")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    runner = OnnxRuntimeRunner(Model("m", proto, {}, ""))
    assert runner.run({"x": np.array([-1, 2], np.float32)})["y"].tolist() == [0, 2]
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.run({"x": np.zeros(2, np.float32)})
