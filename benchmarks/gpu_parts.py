"""The parts of the GPU suite: what is measured of one model. Each returns plain values for the JSON."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_backends import Backend, Built, TimedRunner
from benchmarks.gpu_time import OutOfTime
from diag.compare.record import Record
from diag.compare.selfcheck import self_checks
from diag.compare.split import engine_rules, split
from diag.engines.build import BuildOptions
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, OnnxRuntimeRunner, Runner, timed
from diag.engines.stamp import Identity
from diag.engines.tf32 import emulate_tf32
from diag.errors import EngineError
from diag.feeds import Feeds, open_feeds
from diag.kernels.audit import audit
from diag.kernels.kernel import Kernel
from diag.model.save import save_model
from diag.numerics.formats import FORMATS
from diag.numerics.measured import TensorKind
from diag.pipeline.build.audit_findings import request_for_plan
from diag.pipeline.engine.run import OutputErrors, Three, output_gaps, rel_l2_of, run_three
from diag.pipeline.prepare import Planned, calibrate, plan_on
from diag.plan.schema import Plan, plan_for_format, plan_sha256
from diag.progress import Silent

Found = dict[str, Any]

_METRICS = ("cosine", "sqnr_db", "rel_l2", "max_abs", "nonfinite", "top1", "kl")
_SLOWEST = 5
LEAST_BUILD_S = 25.0
"""An engine is not begun with less time left than this."""


@dataclass(frozen=True)
class Variant:
    """One engine of a model: a plan and a builder flag."""

    name: str
    plan: Plan
    tf32: bool = False


def variants() -> list[Variant]:
    """Those of every model, the most telling first: what does not fit the time is left out at the end."""
    found = [Variant("fp16", plan_for_format("fp16")), Variant("int8", plan_for_format("int8"))]
    found += [Variant("fp32", plan_for_format("fp32")), Variant("bf16", plan_for_format("bf16"))]
    found += [Variant("fp32-tf32", plan_for_format("fp32"), tf32=True)]
    mixed = plan_for_format("int8").model_copy(update={"base": "fp16"})
    found += [Variant("int8-fp16", mixed)]
    found.insert(4, Variant("fp8", plan_for_format("fp8")))
    return found


class Remembering:
    """A runner that computes each batch once."""

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner
        self._seen: dict[str, dict[str, Array]] = {}

    def run(self, feed: Feed) -> dict[str, Array]:
        digest = hashlib.sha256()
        for name in sorted(feed):
            digest.update(np.ascontiguousarray(feed[name]).tobytes())
        key = digest.hexdigest()
        if key not in self._seen:
            assert self._runner is not None
            self._seen[key] = self._runner.run(feed)
        return self._seen[key]

    def close(self) -> None:
        """It is shared between variants; the process ends soon."""


@dataclass
class Bench:
    """One model, its data, and where things go."""

    model_name: str
    model_path: Path
    data: Path
    calibration: Path
    work: Path
    backend: Backend
    batches: int
    opt_level: int
    deadline: float
    """On the monotonic clock."""
    kinds: Mapping[str, TensorKind] = field(default_factory=dict)
    runs: dict[str, Built] = field(default_factory=dict)
    reference: Remembering | None = None

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def gpu(self) -> Iterator[None]:
        """One process at a time on the GPU, so that neither tactics nor latencies are timed in company."""
        import fcntl

        with (self.work.parent / "gpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.left_s < LEAST_BUILD_S:
                raise OutOfTime(f"{self.left_s:.0f} s left when the GPU was free")
            yield

    def built(self, name: str) -> Built:
        """An engine from before. Raises EngineError when there is none."""
        if name not in self.runs:
            raise EngineError(f"there is no {name} engine to start from")
        return self.runs[name]

    def feeds(self, planned: Planned) -> Feeds:
        return open_feeds(str(self.data), planned.model.inputs, self.batches)

    def options(self, planned: Planned, variant: Variant, **more: Any) -> BuildOptions:
        cache = self.work.parent / "timing.cache"
        options = BuildOptions(
            profiles=_profiles(planned, self.feeds(planned)),
            tf32=variant.tf32,
            opt_level=self.opt_level,
            timing_cache=cache,
            timeout_s=max(self.left_s, 1.0),
        )
        return replace(options, **more)


def _profiles(planned: Planned, feeds: Feeds) -> dict[str, tuple[Any, Any, Any]]:
    """From one row to the data's shape; static inputs are left out."""
    found = {}
    for name, shape in feeds.shapes().items():
        dims = planned.model.inputs[name].shape
        if dims is None or any(not isinstance(d, int) for d in dims):
            first = shape[0] if dims is not None and isinstance(dims[0], int) else 1
            found[name] = ((first, *shape[1:]), shape, shape)
    return found


def measure_variant(bench: Bench, variant: Variant) -> Found:
    """Build, audit, compare with reference and emulation, check against itself, time."""
    found: Found = {}
    began = time.monotonic()
    planned, onnx, emulation = _typed(bench, variant, found)
    found["prepare_s"] = time.monotonic() - began
    options = bench.options(planned, variant)
    engine = bench.work / f"{variant.name}.engine"
    with bench.gpu():
        built = bench.backend.build(onnx, engine, options, identity_of(planned))
        bench.runs[variant.name] = built
        found |= build_facts(built)
        runner = bench.backend.open(built)
        try:
            found |= _compare(bench, planned, variant, emulation, runner)
            found |= _times(bench, planned, built, runner)
        finally:
            runner.close()
    request = request_for_plan(planned, found.pop("formats"), built.log)
    facts = audit(built.kernels, request) if built.kernels else []
    found["audit"] = [f"{fact.severity}: {fact.text}" for fact in facts]
    return found


def identity_of(planned: Planned) -> Identity:
    return Identity(planned.model.sha256, plan_sha256(planned.plan))


def _typed(bench: Bench, variant: Variant, found: Found) -> tuple[Planned, Path, Remembering]:
    planned = plan_on(str(bench.model_path), variant.plan)
    calibration = open_feeds(str(bench.calibration), planned.model.inputs, bench.batches)
    table, _ = calibrate(planned, calibration, None, Silent())
    typed = planned.apply(table)
    onnx = bench.work / f"{variant.name}.onnx"
    save_model(typed.for_engines, typed.weights, onnx)
    found["formats"] = dict(typed.formats)
    if bench.reference is None:
        bench.reference = Remembering(OnnxRuntimeRunner(planned.model))
    emulation = Remembering(OnnxRuntimeRunner.emulation(typed.model))
    for feed in bench.feeds(planned):  # while another process has the GPU
        bench.reference.run(feed)
        emulation.run(feed)
    return planned, onnx, emulation


def build_facts(built: Built) -> Found:
    reformats = sum(kernel.is_reformat for kernel in built.kernels)
    return {
        "version": built.version,
        "build_s": built.seconds,
        "build_wall_s": built.wall_seconds,
        "engine_mb": built.engine_bytes / 1e6,
        "kernels": len(built.kernels),
        "reformats": reformats,
        "types": _counted(k.math_type or ",".join(sorted(k.dtypes)) for k in built.kernels if k.multiplies),
    }


def _counted(words: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def _compare(
    bench: Bench, planned: Planned, variant: Variant, emulation: Remembering, runner: TimedRunner
) -> Found:
    assert bench.reference is not None
    three = Three(bench.reference, emulation, runner)
    errors = run_three(three, bench.feeds(planned), bench.kinds, Silent())
    feed = bench.feeds(planned).first()
    format_gap = max(map(rel_l2_of, errors.format.values()), default=0.0)
    tolerance = engine_rules().row_tolerance(_roundoff(planned, variant), format_gap)
    rows = next(iter(feed.values())).shape[0]
    sizes = sorted({1, (rows + 1) // 2, rows}) if bench.options(planned, variant).profiles else [rows]
    checks = self_checks(
        runner.run, feed, tolerance_rel_l2=tolerance, reference=bench.reference.run, sizes=sizes
    )
    lowered = any(fmt != "fp32" for fmt in planned.resolved.formats.values())
    known: Found = {"lowered": lowered, "tf32": variant.tf32}
    tf32_gaps = _tf32_gaps(bench, planned, feed) if variant.tf32 else {}
    verdicts = {
        name: split(errors.gaps(name, **known, tf32_gap=tf32_gaps.get(name)), checks)
        for name in errors.engine
    }
    return {
        "outputs": {name: _errors(errors, name) for name in errors.engine},
        "verdicts": {name: asdict(verdict) for name, verdict in verdicts.items()},
        "self_checks": [check.text for check in checks],
    }


def _errors(errors: OutputErrors, name: str) -> Found:
    return {
        "format": _chosen(errors.format[name]),
        "engine": _chosen(errors.engine[name]),
        "engine_vs_emulation": _chosen(errors.engine_vs_emulation[name]),
    }


def _chosen(record: Record) -> Found:
    metrics = record.metrics()
    return {name: metrics[name] for name in _METRICS if name in metrics}


def _roundoff(planned: Planned, variant: Variant) -> float:
    formats = {FORMATS[f] for f in planned.resolved.formats.values()}
    widest = max((f.unit_roundoff or 2.0**-8 for f in formats), default=0.0)
    return max(widest, 2.0**-11) if variant.tf32 else widest


def _tf32_gaps(bench: Bench, planned: Planned, feed: Feed) -> dict[str, float]:
    assert bench.reference is not None
    emulated = OnnxRuntimeRunner(emulate_tf32(planned.model, planned.types))
    return output_gaps(bench.reference.run(feed), emulated.run(feed))


def _times(bench: Bench, planned: Planned, built: Built, runner: TimedRunner) -> Found:
    feed = bench.feeds(planned).first()
    latency = runner.latency(feed)
    kernels = timed(built.kernels, runner.kernel_times(feed))
    known = [k for k in kernels if k.time_ms is not None]
    slowest = sorted(known, key=lambda k: -(k.time_ms or 0.0))[:_SLOWEST]
    return {
        "latency": asdict(latency),
        "load_average": os.getloadavg()[0],
        "clocks": clocks(),
        "kernels_timed": len(known),
        "kernel_sum_ms": sum(k.time_ms or 0.0 for k in known),
        "reformat_ms": sum(k.time_ms or 0.0 for k in known if k.is_reformat),
        "slowest": [_kernel(k) for k in slowest],
    }


def clocks() -> str:
    """The GPU's clocks right after a measurement, as its driver tells them; empty without one."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _kernel(kernel: Kernel) -> Found:
    return {"name": kernel.name[:120], "tactic": kernel.tactic[:120], "time_ms": kernel.time_ms}
