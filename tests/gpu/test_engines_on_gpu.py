"""Small engines on a real GPU: against their emulation, against themselves, and where they are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.compare.selfcheck import contradictions, self_checks
from diag.compare.split import engine_rules
from diag.engines.build import BuildOptions, build_tensorrt
from diag.engines.debug_tensors import make_listener
from diag.engines.gpu import find_gpus
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, OnnxRuntimeRunner, TensorRtRunner, timed
from diag.engines.stamp import Identity, read_stamp, write_stamp
from diag.engines.tf32 import emulate_tf32
from diag.errors import EngineError
from diag.feeds import open_feeds
from diag.gate.threshold import parse_threshold
from diag.model.save import save_model
from diag.numerics.measured import TensorKind, measure_tensor
from diag.numerics.metrics import error_metrics
from diag.pipeline.engine.builds import EngineBuilds, Runs
from diag.pipeline.engine.run import output_gaps
from diag.pipeline.engine.stage import EngineSettings, Subject, compare_engine
from diag.pipeline.prepare import Planned, calibrate, plan_on
from diag.pipeline.search.job import pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.plan.schema import plan_for_format
from diag.progress import Silent


def why_not() -> str:
    """What is missing; empty when engines can be built and run here."""
    if importlib.util.find_spec("tensorrt") is None:
        return "TensorRT is not installed"
    if not find_gpus():
        return "there is no NVIDIA GPU"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    return ""


WHY = why_not()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY), reason=WHY),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's and TensorRT's own
]

BATCH, WIDTH = 8, 64
PROFILE = {"x": ((1, WIDTH), (BATCH, WIDTH), (2 * BATCH, WIDTH))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer network with a softmax between, and four batches for it."""
    path = tmp_path_factory.mktemp("gpu")
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Softmax", ["a"], ["s"], "soft", axis=-1),
        helper.make_node("Add", ["s", "a"], ["r"], "residual"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], "second"),
    ]
    weights = [
        numpy_helper.from_array((rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32), name)
        for name in ("w1", "w2")
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        weights,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        path / "model.onnx",
    )
    (path / "data").mkdir()
    for number in range(4):
        x = rng.standard_normal((BATCH, WIDTH)).astype(np.float32)
        np.savez(path / "data" / f"{number}.npz", x=x)
    return path


class Case:
    """A plan on the small network, and its engine."""

    def __init__(self, folder: Path, fmt: str, *, tf32: bool = False) -> None:
        self.planned: Planned = plan_on(str(folder / "model.onnx"), plan_for_format(fmt))
        self.feeds = open_feeds(str(folder / "data"), self.planned.model.inputs)
        table, _ = calibrate(self.planned, self.feeds, None, Silent())
        self.typed = self.planned.apply(table)
        self.options = BuildOptions(profiles=PROFILE, tf32=tf32, opt_level=1, timeout_s=300)
        self.identity = Identity(self.planned.model.sha256)
        self.onnx = folder / f"{fmt}.onnx"
        self.engine = folder / f"{fmt}-{'tf32' if tf32 else 'plain'}.engine"
        save_model(self.typed.proto, self.typed.weights, self.onnx)
        self.built = build_tensorrt(self.onnx, self.engine, options=self.options, identity=self.identity)

    def gaps(self) -> tuple[float, float]:
        """Relative L2 of the engine against emulation and reference."""
        typed = self.typed.model
        feed = self.feeds.first()
        with TensorRtRunner(self.engine, self.identity) as runner:
            built = runner.run(feed)
        emulated = OnnxRuntimeRunner.emulation(typed).run(feed)
        reference = OnnxRuntimeRunner(self.planned.model).run(feed)
        return output_gaps(emulated, built)["y"], output_gaps(reference, built)["y"]


Make = Callable[..., Case]


@pytest.fixture(scope="module")
def case(folder: Path) -> Make:
    """Builds each engine once."""

    @cache
    def make(fmt: str, tf32: bool = False) -> Case:
        return Case(folder, fmt, tf32=tf32)

    return make


@pytest.mark.parametrize(
    ("fmt", "emulated", "least", "most"),
    [
        ("fp32", 1e-5, 0.0, 1e-5),
        ("fp16", 2e-3, 1e-5, 2e-3),
        ("bf16", 2e-2, 1e-4, 2e-2),
        ("int8", 1e-2, 1e-4, 5e-2),  # a code may round to the other side
    ],
)
def test_an_engine_is_as_its_emulation(
    case: Make, fmt: str, emulated: float, least: float, most: float
) -> None:
    to_emulation, to_reference = case(fmt).gaps()
    assert to_emulation < emulated
    assert least <= to_reference < most


def test_tf32_is_explained_by_its_emulation(case: Make) -> None:
    tf32 = case("fp32", tf32=True)
    feed = tf32.feeds.first()
    reference = OnnxRuntimeRunner(tf32.planned.model).run(feed)
    emulated = OnnxRuntimeRunner(emulate_tf32(tf32.planned.model, tf32.planned.types)).run(feed)
    gap = output_gaps(reference, emulated)["y"]
    _, measured = tf32.gaps()
    assert measured < engine_rules().tf32_ratio * gap


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "int8"])
def test_a_healthy_engine_agrees_with_itself(case: Make, fmt: str) -> None:
    tolerance = engine_rules().row_tolerance({"fp32": 2.0**-24, "fp16": 2.0**-11, "int8": 2.0**-8}[fmt])
    with TensorRtRunner(case(fmt).engine) as runner:
        feed = case(fmt).feeds.first()
        found = self_checks(runner.run, feed, tolerance_rel_l2=tolerance, sizes=(1, 3, BATCH, 2 * BATCH))
    assert {check.status for check in found} == {"agrees"}
    assert contradictions(found) == []
    assert found[0].rel_l2 == 0.0  # the same call twice is bit-equal


def test_latency_and_kernel_times(case: Make) -> None:
    fp16 = case("fp16")
    feed = fp16.feeds.first()
    with TensorRtRunner(fp16.engine) as runner:
        latency = runner.latency(feed, runs=100)
        times = runner.kernel_times(feed)
    assert 0 < latency.low_ms <= latency.median_ms <= latency.high_ms < 50
    assert latency.runs == 100
    assert latency.warmup >= 10
    kernels = timed(fp16.built.kernels, times)
    assert kernels
    assert all(kernel.time_ms is not None and kernel.time_ms > 0 for kernel in kernels)


def test_shapes_outside_the_profile_are_refused(case: Make) -> None:
    with TensorRtRunner(case("fp16").engine) as runner:
        with pytest.raises(EngineError, match=r"does not fit the engine's profile, \(1, 64\) to \(16, 64\)"):
            runner.run({"x": np.zeros((17, WIDTH), np.float32)})
        with pytest.raises(EngineError, match="'x' is not fed"):
            runner.run({"other": np.zeros((8, WIDTH), np.float32)})
        assert runner.run({"x": np.zeros((2, WIDTH), np.float32)})["y"].shape == (2, WIDTH)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": "10.5.0"}, "10.5.0 built it"),
        ({"compute_capability": "8.0"}, "for compute capability 8.0"),
        ({"engine_sha256": "0" * 64}, "changed since it was stamped"),
    ],
)
def test_another_stamp_is_refused(case: Make, tmp_path: Path, change: dict[str, str], problem: str) -> None:
    copy = tmp_path / "copy.engine"
    copy.write_bytes(case("fp16").engine.read_bytes())
    write_stamp(copy, replace(read_stamp(case("fp16").engine), **change))
    with pytest.raises(EngineError, match=problem):
        TensorRtRunner(copy)


def test_an_engine_larger_than_the_memory_is_refused_in_one_sentence(case: Make) -> None:
    import torch

    with TensorRtRunner(case("fp16").engine) as runner:
        original = torch.empty

        def full(*_: object, **__: object) -> object:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        torch.empty = full
        try:
            with pytest.raises(EngineError, match="memory does not hold the engine"):
                runner.run({"x": np.zeros((5, WIDTH), np.float32)})
        finally:
            torch.empty = original


def test_outputs_are_measured_on_the_device_as_on_the_host(case: Make) -> None:
    fp16 = case("fp16")
    feeds = list(fp16.feeds)
    reference, kinds = OnnxRuntimeRunner(fp16.planned.model), {"y": TensorKind("logits", noise=1e-3)}
    with TensorRtRunner(fp16.engine, fp16.identity) as runner:
        for feed in [*feeds, {"x": feeds[0]["x"][:5]}]:  # the last has another shape
            expected, built = reference.run(feed), runner.run(feed)
            twin = {"y": built["y"]}
            found, same = runner.measured(feed, (expected, twin), kinds)
            host = measure_tensor(expected["y"].astype(np.float32), built["y"].astype(np.float32), kinds["y"])
            assert error_metrics(found["y"].sums) == pytest.approx(
                error_metrics(host.sums), rel=1e-4, abs=1e-9
            )
            assert found["y"].decisions.same_top1 == host.decisions.same_top1
            assert found["y"].decisions.kl_sum == pytest.approx(host.decisions.kl_sum, abs=1e-5)
            assert same["y"].sums.max_abs == 0


def test_an_output_of_another_shape_is_refused(case: Make) -> None:
    feed = case("fp16").feeds.first()
    with TensorRtRunner(case("fp16").engine) as runner:
        with pytest.raises(EngineError, match="has shape"):
            runner.measured(feed, ({"y": np.zeros((3, 3), np.float32)},), {})
        with pytest.raises(EngineError, match="no output 'z'"):
            runner.measured(feed, ({"z": np.zeros((3, 3), np.float32)},), {})


@pytest.mark.parametrize("dtype", ["FLOAT", "HALF", "BF16", "FP8"])
def test_the_listener_reads_every_format_at_its_address(dtype: str) -> None:
    """As TensorRT 10.12 calls it; 10.6, which the rest runs on, builds no engine that does."""
    import tensorrt as trt
    import torch

    spelling = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn"}[dtype]
    reference = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    held = torch.from_numpy(reference + 0.01).to("cuda").to(getattr(torch, spelling))
    listener = make_listener(trt, torch, {"t": reference})
    stream = torch.cuda.current_stream().cuda_stream
    for name in ("t", "unknown"):
        assert listener.process_debug_tensor(
            held.data_ptr(), trt.TensorLocation.DEVICE, getattr(trt.DataType, dtype), (4, 6), name, stream
        )
    error = held.double().cpu().numpy() - reference
    assert list(listener.found) == ["t"]
    assert listener.found["t"].error_square.sum() == pytest.approx((error**2).sum(), rel=1e-4)


class OneWrongLayer(EngineBuilds):
    """Built and run on the GPU, with noise as large as the signal added where the first layer is in INT8."""

    @contextmanager
    def open(self, subject: Subject, identity: Identity) -> Iterator[Runs]:
        with super().open(subject, identity) as engine:
            wrong = subject.typed.formats["first"] == "int8"
            yield Noisy(engine) if wrong else engine


@dataclass(frozen=True)
class Noisy:
    engine: Runs

    def run(self, feed: Feed) -> dict[str, Array]:
        noise = np.random.default_rng(0).standard_normal((BATCH, WIDTH))
        return {name: a + noise * a.std() for name, a in self.engine.run(feed).items()}


@pytest.mark.parametrize(("kind", "pins"), [(EngineBuilds, []), (OneWrongLayer, ["first"])])
def test_pins_are_confirmed_and_repaired_on_builds(
    folder: Path, tmp_path: Path, kind: type[EngineBuilds], pins: list[str]
) -> None:
    data = SearchSettings(
        str(folder / "model.onnx"),
        str(folder / "data"),
        str(tmp_path),
        (parse_threshold("sqnr_db>=15"),),
        format="int8",
        confirm="tensorrt",
    )
    found = pin_layers(data, Silent(), kind(EngineSettings("tensorrt", opt_level=1)))
    assert (found.search.pins, found.met, found.on_engine) == (pins, True, True)
    assert found.builds is not None
    assert found.builds.found.builds <= found.builds.found.limit
    assert found.report is not None
    assert found.report.outputs[0].engine["sqnr_db"] >= 15  # of the engine that ships, which is wrong nowhere
    assert read_stamp(tmp_path / "model.engine").identity.plan_sha256 == found.report.plan.sha256
    assert not (tmp_path / ".builds").exists()


def test_the_engine_stage(case: Make, folder: Path, tmp_path: Path) -> None:
    fp16 = case("fp16")
    subject = Subject(fp16.planned, fp16.typed, fp16.feeds, tmp_path)
    settings = EngineSettings(
        "tensorrt", shapes=("x:1x64/8x64/16x64",), tf32=False, opt_level=1, noise_floor=True, observer=True
    )
    found = compare_engine(subject, settings, Silent())
    assert found.verdicts["y"].kind == "agreement"
    assert {check.status for check in found.checks} == {"agrees"}
    assert [finding.title for finding in found.findings if finding.severity == "error"] == []
    assert found.latency is not None
    assert (tmp_path / "timing.cache").is_file()
    assert any("marked build" in note for note in found.notes)
