"""The engine stage with ONNX Runtime as the engine: everything but TensorRT's own calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from diag.engines.build import BuildOptions, BuildResult
from diag.engines.latency import summarise
from diag.engines.runner import OnnxRuntimeRunner
from diag.engines.stamp import Identity, Stamp, read_stamp, sha256_of, write_stamp
from diag.errors import EngineError
from diag.feeds import open_feeds
from diag.kernels.kernel import Kernel, Tensor
from diag.model.load import load_model
from diag.pipeline.engine import stage
from diag.pipeline.engine.stage import (
    EngineFound,
    EngineSettings,
    Subject,
    compare_engine,
    legal_sizes,
    require_engine,
)
from diag.pipeline.prepare import plan_on
from diag.plan.schema import plan_for_format, plan_sha256
from diag.progress import Silent
from diag.report.schema import LayerInfo, ModelInfo, OutputInfo, Report, RunInfo

Break = Callable[[np.ndarray], np.ndarray]


def two_matmuls(path: Path) -> Path:
    rng = np.random.default_rng(5)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("Tanh", ["a"], ["b"], "tanh"),
        helper.make_node("MatMul", ["b", "w2"], ["y"], "second"),
    ]
    weights = [
        numpy_helper.from_array(rng.standard_normal((32, 32)).astype(np.float32) / 6, name)
        for name in ("w1", "w2")
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 32])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@dataclass
class Bench:
    """A comparison whose engine is ONNX Runtime with `break_output` put behind it."""

    subject: Subject
    builds: list[str]

    def compare(self, **options: Any) -> EngineFound:
        settings = EngineSettings(**{"engine": "tensorrt", "shapes": ("x:1x32/6x32/12x32",), **options})
        return compare_engine(self.subject, settings, Silent())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    def make(fmt: str, break_output: Break = lambda y: y, break_marked: Break | None = None) -> Bench:
        planned = plan_on(str(two_matmuls(tmp_path / "m.onnx")), plan_for_format(fmt))
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        for number in range(2):
            x = np.random.default_rng(number).standard_normal((6, 32)).astype(np.float32)
            np.savez(data / f"{number}.npz", x=x)
        feeds = open_feeds(str(data), planned.model.inputs)
        subject = Subject(planned, planned.apply(None), feeds, tmp_path)
        builds: list[str] = []

        def build(onnx_path: Path, out: Path, *, options: BuildOptions, identity: Identity) -> BuildResult:
            builds.append(f"{out.name} marks={options.marks} cache={options.timing_cache is not None}")
            out.write_bytes(b"ftrt" + onnx_path.read_bytes())
            profiles = {name: [list(s) for s in shapes] for name, shapes in options.profiles.items()}
            flags = {"tf32": "on" if options.tf32 else "off", "marks": options.marks}
            stamp = Stamp(sha256_of(out), identity, "tensorrt", "10.6.0", flags=flags, profiles=profiles)
            write_stamp(out, stamp)
            return BuildResult(out, None, None, 1.0, 2.0, 3, "10.6.0", kernels(fmt))

        class Runner(OnnxRuntimeRunner):
            def __init__(self, path: Path) -> None:
                self.stamp = read_stamp(path)
                typed = tmp_path / "run.onnx"
                typed.write_bytes(path.read_bytes()[4:])
                super().__init__(load_model(str(typed)))

            def __enter__(self) -> Runner:
                return self

            def __exit__(self, *_: object) -> None:
                self.close()

            def run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
                broken = break_marked if self.stamp.flags["marks"] == "all" and break_marked else break_output
                return {name: broken(value) for name, value in super().run(feed).items()}

            def latency(self, feed: Mapping[str, Any]) -> Any:
                return summarise([1.0, 2.0, 3.0], 10)

            def kernel_times(self, feed: Mapping[str, Any]) -> dict[str, float]:
                return {"gemm_first": 0.25}

        monkeypatch.setattr(stage, "build_tensorrt", build)
        monkeypatch.setattr(stage, "TensorRtRunner", Runner)
        return Bench(subject, builds)

    return make


def kernels(fmt: str) -> tuple[Kernel, ...]:
    def one(name: str, node: str) -> Kernel:
        matrix = (Tensor("i", (6, 32), fmt), Tensor("w", (32, 32), fmt, constant=True))
        return Kernel(name, "gemm", (node,), matrix, (Tensor("o", (6, 32), fmt),), tactic="sm90_gemm")

    return one("gemm_first", "first"), one("gemm_second", "second")


def test_a_healthy_engine(bench: Callable[..., Bench]) -> None:
    fp16 = bench("fp16")
    found = fp16.compare()
    assert found.verdicts["y"].kind == "agreement"
    assert {check.status for check in found.checks} == {"agrees"}
    assert [finding.kind for finding in found.findings if finding.severity == "error"] == []
    assert found.outputs.batches == 2
    assert [k.time_ms for k in found.kernels] == [0.25, None]
    assert "1 to 3, median and 95 % interval of 3 runs after 10" in found.flags["engine latency"]
    assert fp16.builds == ["model.engine marks=none cache=True"]
    stamp = read_stamp(fp16.subject.out / "model.engine")
    assert stamp.identity.plan_sha256 == plan_sha256(fp16.subject.planned.plan)


@pytest.mark.parametrize("fmt", ["fp32", "fp16"])
def test_a_transposed_output_is_a_defect_and_named(bench: Callable[..., Bench], fmt: str) -> None:
    def exchange(y: np.ndarray) -> np.ndarray:  # within rows, so that the engine agrees with itself
        return y.reshape(len(y), 4, 8).transpose(0, 2, 1).reshape(y.shape)

    found = bench(fmt, exchange).compare()
    assert found.verdicts["y"].kind == "engine-defect"
    finding = found.findings[0]
    assert (finding.kind, finding.severity) == ("engine-defect", "error")
    assert finding.layers == ["second"]
    assert "the reference transposed by (0, 2, 1) and read as (6, 4, 8)" in finding.title
    assert finding.evidence["layout"] == "transpose"


def test_rows_that_depend_on_each_other_void_the_rest(bench: Callable[..., Bench]) -> None:
    found = bench("fp16", lambda y: np.stack([np.roll(r, b) for b, r in enumerate(y)])).compare()
    assert found.verdicts["y"].kind == "batch-or-shape"
    assert found.findings[0].kind == "batch-or-shape"
    assert "rolled by 1 times b" in found.findings[0].title


def test_noise_floor_and_marked_build(bench: Callable[..., Bench]) -> None:
    fp16 = bench("fp16", break_marked=lambda y: y * np.float32(1.25))
    found = fp16.compare(noise_floor=True, observer=True)
    assert fp16.builds == [
        "model.engine marks=none cache=True",
        "rebuilt.engine marks=none cache=False",
        "marked.engine marks=all cache=True",
    ]
    observer = next(finding for finding in found.findings if finding.kind == "observer-effect")
    assert observer.evidence["marked_rel_l2"] == pytest.approx(0.25, rel=1e-3)
    assert found.verdicts["y"].kind == "agreement"  # the marked build is never the verdict
    assert "marked build: 2 kernels instead of 2" in found.notes[0]


def test_an_fp32_engine_with_tf32_is_not_blamed(bench: Callable[..., Bench]) -> None:
    rounding = np.random.default_rng(0)

    def tf32_like(y: np.ndarray) -> np.ndarray:
        return y * (1 + 4e-4 * rounding.standard_normal(y.shape)).astype(np.float32)

    fp32 = bench("fp32", tf32_like)
    found = fp32.compare(shapes=("x:6x32",))
    assert found.verdicts["y"].numbers["tf32_rel_l2"] > 1e-4
    assert found.verdicts["y"].kind in ("tf32-default", "nondeterministic")


def test_an_engine_of_another_plan_is_refused(bench: Callable[..., Bench]) -> None:
    fp16 = bench("fp16")
    fp16.compare()
    engine = fp16.subject.out / "model.engine"
    fp32 = bench("fp32")
    with pytest.raises(EngineError, match="built from another plan"):
        fp32.compare(engine=str(engine))


def test_found_goes_into_the_report(bench: Callable[..., Bench]) -> None:
    found = bench("fp16").compare()
    found.layers["a"] = {"sqnr_db": 33.0}
    report = Report(
        model=ModelInfo(path="m.onnx", sha256="0", opset=17, node_count=3),
        run=RunInfo(
            command="",
            engine="emulation",
            versions={},
            batches=2,
            samples=12,
            seconds=1.0,
            peak_memory_mb=1.0,
            started="",
        ),
        verdict="FP16: good.",
        outputs=[OutputInfo(name="y", metrics={"sqnr_db": 50.0})],
        layers=[
            LayerInfo(id=n, name=n, op_type="MatMul", format="fp16", outputs=[o], status="compared")
            for n, o in (("first", "a"), ("second", "y"))
        ],
    )
    found.put_into(report)
    assert report.run.engine == "tensorrt 10.6.0; emulation"
    assert report.run.flags["engine tf32"] == "on"
    assert report.outputs[0].engine["sqnr_db"] > 50
    assert report.outputs[0].engine_vs_emulation["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert [layer.engine for layer in report.layers] == [{"sqnr_db": 33.0}, {}]
    assert report.kernels[0].time_ms == 0.25
    assert report.verdict.startswith("FP16: good. Engine: ")
    Report.model_validate_json(report.model_dump_json(by_alias=True))


def test_what_cannot_work_is_said_before_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "load", lambda flavour: None)
    monkeypatch.setattr(stage, "find_gpus", lambda: ())
    with pytest.raises(EngineError, match="none is here"):
        require_engine("tensorrt")
    require_engine("tensorrt-rtx")
    with pytest.raises(EngineError, match="has no stamp"):
        require_engine(str(tmp_path / "m.engine"))
    (tmp_path / "m.engine").write_bytes(b"ftrt")
    write_stamp(tmp_path / "m.engine", Stamp("", Identity(), "tensorrt", "10.6.0", "9.0"))
    with pytest.raises(EngineError, match="no NVIDIA GPU is here"):
        require_engine(str(tmp_path / "m.engine"))


@pytest.mark.parametrize(
    ("profiles", "sizes"),
    [
        ({"x": [[1, 32], [6, 32], [12, 32]]}, (1, 6, 12)),
        ({"x": [[2, 32], [6, 32], [6, 32]]}, (2, 4, 6)),
        ({}, (6,)),
    ],
)
def test_legal_sizes(tmp_path: Path, profiles: dict[str, list[list[int]]], sizes: tuple[int, ...]) -> None:
    model = load_model(str(two_matmuls(tmp_path / "m.onnx")))
    stamp = Stamp("", Identity(), "tensorrt", "10.6.0", profiles=profiles)
    assert legal_sizes(stamp, model, {"x": np.zeros((6, 32), np.float32)}) == sizes


@pytest.mark.rtx
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="the TensorRT-RTX wheel is not installed (pip install 'trtdiag[rtx]')",
)
def test_rtx_without_a_gpu_is_built_and_read(bench: Callable[..., Bench]) -> None:
    found = bench("fp16").compare(engine="tensorrt-rtx", compute_capability="SM89")
    assert found.label.startswith("tensorrt-rtx ")
    assert {dtype for kernel in found.kernels for dtype in kernel.dtypes} >= {"fp16"}
    assert found.outputs.engine == {}
    assert "not run" in found.notes[0]
