"""Who builds for `gpu_pins`: TensorRT in turns with the other cases, or ONNX Runtime in its place."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, OnnxRuntimeRunner
from diag.engines.stamp import Identity
from diag.pipeline.engine.builds import EngineBuilds, Runs
from diag.pipeline.engine.stage import Subject
from diag.search.builds import Pointed


@dataclass(frozen=True)
class TakingTurns(EngineBuilds):
    """TensorRT, one process at a time on the GPU, so that tactics are not timed in company."""

    lock: Path = Path("gpu.lock")
    seconds: list[float] = field(default_factory=list)
    """What each build and run took."""

    @contextmanager
    def open(self, subject: Subject, identity: Identity) -> Iterator[Runs]:
        with self.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            began = time.monotonic()
            with super().open(subject, identity) as engine:
                yield engine
            self.seconds.append(time.monotonic() - began)


@dataclass
class Rehearsed:
    """The emulation as the engine. `merges`: wrong in blocks whose projections, QK and PV are all in INT8."""

    merges: bool = False
    seconds: list[float] = field(default_factory=list)
    name: str = "tensorrt"
    identity: str = "rehearsal"
    runs: bool = True

    @contextmanager
    def open(self, subject: Subject, identity: Identity) -> Iterator[Runs]:
        began = time.monotonic()
        sick = len(_sick_blocks(subject)) if self.merges else 0
        yield _Worse(OnnxRuntimeRunner.emulation(subject.typed.model), 0.08 * sick)
        self.seconds.append(time.monotonic() - began)

    def suspects(self, subject: Subject, identity: Identity, among: Collection[str]) -> Pointed:
        """As the known issue's kernels would name them."""
        roles = subject.planned.roles
        return Pointed(tuple(n for n in roles if self.merges and roles[n].name == "qkv_proj"))

    def drop(self, out: Path, identity: Identity) -> None:
        """Nothing was written."""

    def kept(self, out: Path, identity: Identity) -> str:
        return "emulate"

    def finish(self, out: Path, identity: Identity) -> None:
        """Nothing was written."""


def _sick_blocks(subject: Subject) -> set[int]:
    formats, blocks = subject.typed.formats, dict[int, list[bool]]()
    for name, role in subject.planned.roles.items():
        multiplies = subject.planned.model.layer_by_id[name].op_type == "MatMul"
        if multiplies and role.name in ("qkv_proj", "qk_matmul", "pv_matmul") and role.block is not None:
            blocks.setdefault(role.block, []).append(formats[name] == "int8")
    return {block for block, quantized in blocks.items() if all(quantized)}


@dataclass(frozen=True)
class _Worse:
    runner: OnnxRuntimeRunner
    noise: float
    """Relative to the outputs' standard deviation."""

    def run(self, feed: Feed) -> Mapping[str, Array]:
        rng = np.random.default_rng(0)
        found = self.runner.run(feed)
        return {n: a + self.noise * a.std() * rng.standard_normal(a.shape) for n, a in found.items()}
