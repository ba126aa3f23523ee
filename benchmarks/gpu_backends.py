"""What runs the typed models of the GPU suite: TensorRT, or ONNX Runtime in its place for a rehearsal."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diag.engines.build import BuildOptions, build_rtx, build_tensorrt
from diag.engines.latency import Latency, summarise
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, OnnxRuntimeRunner, Runner, TensorRtRunner
from diag.engines.stamp import Identity
from diag.engines.tensorrt import load
from diag.errors import EngineError
from diag.kernels.kernel import Kernel
from diag.model.load import load_model


class TimedRunner(Runner, Protocol):
    """A runner that can be timed."""

    def latency(self, feed: Feed) -> Latency: ...

    def kernel_times(self, feed: Feed) -> dict[str, float]: ...


@dataclass(frozen=True)
class Built:
    """An engine of the suite. `kernels` is empty where nothing could be read."""

    path: Path
    seconds: float
    wall_seconds: float
    version: str
    kernels: tuple[Kernel, ...]
    engine_bytes: int
    log: Path | None


class Backend(Protocol):
    name: str

    def build(self, onnx: Path, engine: Path, options: BuildOptions, identity: Identity) -> Built: ...

    def open(self, built: Built) -> TimedRunner: ...


class TensorRt:
    """The real thing."""

    name = "tensorrt"

    def __init__(self) -> None:
        """Load what takes seconds now, before this process has the GPU to itself."""
        with suppress(EngineError, RuntimeError, ImportError):
            import torch

            load("tensorrt")
            torch.zeros(1, device="cuda")

    def build(self, onnx: Path, engine: Path, options: BuildOptions, identity: Identity) -> Built:
        made = build_tensorrt(onnx, engine, options=options, identity=identity)
        assert made.engine_path is not None
        times = (made.seconds, made.wall_seconds)
        return Built(made.engine_path, *times, made.version, made.kernels, made.engine_bytes, made.log_path)

    def open(self, built: Built) -> TimedRunner:
        return TensorRtRunner(built.path)


class Rehearsal:
    """ONNX Runtime on the typed model as the engine; kernels from TensorRT-RTX where it is installed."""

    name = "rehearsal by ONNX Runtime"

    def build(self, onnx: Path, engine: Path, options: BuildOptions, identity: Identity) -> Built:
        began = time.monotonic()
        kernels: tuple[Kernel, ...] = ()
        with suppress(EngineError):
            plain = BuildOptions(profiles=options.profiles, tf32=options.tf32, timeout_s=options.timeout_s)
            kernels = build_rtx(onnx, options=plain).kernels
        seconds = time.monotonic() - began
        return Built(onnx, seconds, seconds, "0", kernels, onnx.stat().st_size, None)

    def open(self, built: Built) -> TimedRunner:
        return _RehearsedRunner(built.path)


class _RehearsedRunner:
    def __init__(self, onnx: Path) -> None:
        model = load_model(str(onnx))
        try:
            self._runner = OnnxRuntimeRunner(model)
        except EngineError:  # no kernel for a format on the CPU: BF16 mostly
            self._runner = OnnxRuntimeRunner.emulation(model)

    def run(self, feed: Feed) -> dict[str, Array]:
        return self._runner.run(feed)

    def close(self) -> None:
        self._runner.close()

    def latency(self, feed: Feed) -> Latency:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            self.run(feed)
            times.append((time.perf_counter() - began) * 1e3)
        return summarise(times)

    def kernel_times(self, feed: Feed) -> dict[str, float]:
        return {}
