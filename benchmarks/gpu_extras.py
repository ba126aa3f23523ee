"""What the GPU suite measures besides the engines: a mend, the observer effect, overhead, weak typing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

import numpy as np

from benchmarks.gpu_backends import Built, TimedRunner
from benchmarks.gpu_parts import Bench, Found, Variant, build_facts, identity_of, measure_variant
from diag.compare.split import Gaps, observer_verdict
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, TensorRtRunner
from diag.engines.tensorrt import Marks
from diag.engines.weak import WeakTyping
from diag.pipeline.compare.job import compare
from diag.pipeline.engine.run import measured_outputs, output_gaps
from diag.pipeline.prepare import plan_on
from diag.pipeline.settings import CompareSettings
from diag.plan.schema import plan_for_format, read_plan
from diag.progress import Silent


def mend(bench: Bench) -> Found:
    """FP16 mended by measurement: the pins that compare's findings ask for, then the mended engine."""
    out = bench.work / "compare"
    settings = CompareSettings(
        str(bench.model_path), str(bench.data), str(out), format="fp16", limit=min(bench.batches, 2)
    )
    began = time.monotonic()
    report = compare(settings, Silent())
    seconds = time.monotonic() - began
    plan = read_plan(str(out / "mend.yaml"))
    found = measure_variant(bench, Variant("fp16-mended", plan))
    kinds = [f"{f.kind}: {f.title} ({len(f.mend.pins)} pins)" for f in report.findings]
    return {"compare_s": seconds, "pins": len(plan.pins), "findings": kinds, **found}


def observer(bench: Bench) -> Found:
    """Every tensor marked as an output, beside the shipped engine and a rebuild without the timing cache."""
    variant = Variant("fp16", plan_for_format("fp16"))
    planned = plan_on(str(bench.model_path), variant.plan)
    onnx, shipped = bench.work / "fp16.onnx", bench.built("fp16")
    feed = bench.feeds(planned).first()
    with bench.gpu():
        outputs, _, _ = _run_once(bench, shipped, feed)
        others: Found = {}
        ways: dict[str, tuple[Marks, bool]] = {"rebuilt": ("none", False), "marked": ("all", True)}
        for name, (marks, cached) in ways.items():
            more: Found = {"marks": marks} if cached else {"marks": marks, "timing_cache": None}
            options = bench.options(planned, variant, **more)
            engine = bench.work / f"fp16-{name}.engine"
            built = bench.backend.build(onnx, engine, options, identity_of(planned))
            got, latency, _ = _run_once(bench, built, feed)
            others[name] = {
                "kernels": len(built.kernels),
                "build_s": built.seconds,
                "latency": latency,
                "rel_l2": output_gaps(outputs, got),
                "max_abs": {n: float(np.abs(got[n] - outputs[n]).max()) for n in outputs},
            }
    verdicts = {}
    for name, gap in others["marked"]["rel_l2"].items():
        noise = others["rebuilt"]["rel_l2"][name]
        verdict = observer_verdict(Gaps(0.0, 0.0, 0.0, noise_gap=noise, marked_gap=gap))
        verdicts[name] = asdict(verdict) if verdict else {}
    return {"shipped_kernels": len(shipped.kernels), **others, "verdicts": verdicts}


def _run_once(bench: Bench, built: Built, feed: Feed) -> tuple[dict[str, Array], Found, float]:
    runner = bench.backend.open(built)
    try:
        outputs = runner.run(feed)
        latency = asdict(runner.latency(feed))
        began = time.perf_counter()
        for _ in range(20):
            runner.run(feed)
        return outputs, latency, (time.perf_counter() - began) * 50
    finally:
        runner.close()


def overhead(bench: Bench) -> Found:
    """What a batch costs on the engine's side: bare, with its arrays moved, and compared (wall, median).

    Compared means: inputs brought, run, references brought, errors measured and known. Once against one
    reference, once against two (reference and emulation), as the command does.
    """
    planned = plan_on(str(bench.model_path), plan_for_format("fp16"))
    feed = bench.feeds(planned).first()
    assert bench.reference is not None
    reference = bench.reference.run(feed)
    twin = {name: array.copy() for name, array in reference.items()}  # in the emulation's place
    with bench.gpu():
        _, latency, moved_ms = _run_once(bench, bench.built("fp16"), feed)
        runner = bench.backend.open(bench.built("fp16"))
        try:
            started = _bare_wall_ms(runner, feed)
            once = _median_ms(lambda: measured_outputs(runner, feed, (reference,), {}))
            both = _median_ms(lambda: measured_outputs(runner, feed, (reference, twin), {}))
        finally:
            runner.close()
    bare = latency["median_ms"]
    return {
        "bare_ms": bare,
        "started_and_awaited_ms": started,
        "with_transfers_ms": moved_ms,
        "compared_ms": once,
        "compared_twice_ms": both,
        "times_bare": once / bare,
        "twice_times_bare": both / bare,
        "times_with_transfers": once / moved_ms,
    }


def _bare_wall_ms(runner: TimedRunner, feed: Feed) -> float:
    """One enqueue, begun and awaited by this process, inputs on the device; the whole run in a rehearsal."""
    if not isinstance(runner, TensorRtRunner):
        return _median_ms(lambda: runner.run(feed))
    import torch

    runner.bind(feed)
    return _median_ms(lambda: (runner.enqueue(), torch.cuda.synchronize()))


def _median_ms(work: Callable[[], object], runs: int = 200, warmup: int = 20) -> float:
    times = []
    for _ in range(warmup + runs):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times[warmup:])


def weak(bench: Bench) -> Found:
    """INT8 and FP16 by flags and an entropy calibrator: is there any INT8 in what the builder makes of it?"""
    variant = Variant("weak", plan_for_format("int8"))
    planned = plan_on(str(bench.model_path), variant.plan)
    typing = WeakTyping(
        ("int8", "fp16"), cache=str(bench.work / "weak.cache"), batches=str(bench.calibration)
    )
    options = bench.options(planned, variant, weak=typing)
    assert bench.reference is not None
    feed = bench.feeds(planned).first()
    with bench.gpu():
        built = bench.backend.build(
            bench.model_path, bench.work / "weak.engine", options, identity_of(planned)
        )
        outputs, latency, _ = _run_once(bench, built, feed)
    int8 = sum("int8" in kernel.dtypes for kernel in built.kernels)
    return {
        **build_facts(built),
        "int8_kernels": int8,
        "latency_ms": latency["median_ms"],
        "rel_l2": output_gaps(bench.reference.run(feed), outputs),
    }
