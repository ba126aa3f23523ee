"""The engine stage of a comparison: build the typed model, read it back, run it beside the other numerics.

Where no GPU can run the engine (TensorRT-RTX compiles without one), it is built and audited, and not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from diag.compare.layout import Layout, fingerprint
from diag.compare.selfcheck import SelfCheck, self_checks
from diag.compare.split import Gaps, Verdict, engine_rules, observer_verdict, split
from diag.engines.build import BuildOptions, build_rtx, build_tensorrt
from diag.engines.debug_tensors import can_observe
from diag.engines.gpu import find_gpus
from diag.engines.latency import Latency
from diag.engines.runner import Feed, OnnxRuntimeRunner, Runner, TensorRtRunner, refuse_elsewhere, timed
from diag.engines.stamp import Identity, Stamp, check_stamp, read_stamp
from diag.engines.tensorrt import Flavour, Marks, load
from diag.engines.tf32 import emulate_tf32
from diag.errors import EngineError
from diag.feeds import Feeds
from diag.kernels.audit import audit
from diag.kernels.kernel import Kernel
from diag.kernels.known import Build, match_known_issues
from diag.kernels.read import LOG_SUFFIX, read_kernels
from diag.model.graph import Model
from diag.model.save import save_model
from diag.numerics.formats import FORMATS
from diag.numerics.measured import TensorKind
from diag.pipeline.build.audit_findings import built_layers, findings_of, request_for_plan
from diag.pipeline.build.job import CURRENT, TIMING_CACHE, default_target
from diag.pipeline.engine.findings import Faults, fault_findings
from diag.pipeline.engine.found import EngineFound
from diag.pipeline.engine.fusion import Outputs, fusion_finding, run_experiments
from diag.pipeline.engine.layers import observed_layers
from diag.pipeline.engine.profiles import profiles_for
from diag.pipeline.engine.run import Three, output_gaps, rel_l2_of, run_three
from diag.pipeline.inspect.report import known_issue_findings
from diag.pipeline.prepare import Planned
from diag.pipeline.settings import EngineSettings
from diag.plan.schema import plan_sha256
from diag.progress import Progress
from diag.report.schema import Finding
from diag.typed.apply import TypedModel

ENGINE_FILE = "model.engine"
TYPED_FILE = "typed.onnx"


@dataclass(frozen=True)
class Subject:
    """What is compared; `kinds` as in `diag.compare.comparison`."""

    planned: Planned
    typed: TypedModel
    feeds: Feeds
    out: Path
    kinds: Mapping[str, TensorKind] = field(default_factory=dict)

    @property
    def lowered(self) -> bool:
        """Whether any layer computes in less than FP32."""
        return any(fmt != "fp32" for fmt in self.typed.formats.values())

    @property
    def unit_roundoff(self) -> float:
        """The widest of the formats in use; an integer format counts as one of 8 bits."""
        return max(FORMATS[fmt].unit_roundoff or 2.0**-8 for fmt in {"fp32", *self.typed.formats.values()})


@dataclass(frozen=True)
class Engine:
    """A built engine, and what is known of it."""

    path: Path
    stamp: Stamp
    kernels: tuple[Kernel, ...]
    log: Path


def require_engine(engine: str) -> None:
    """What would fail only after the long comparison: no TensorRT, no GPU, an engine file without its stamp.

    Raises EngineError; `engine` is as in `EngineSettings`.
    """
    if engine not in ("tensorrt", "tensorrt-rtx"):
        stamp = read_stamp(engine)
        refuse_elsewhere(stamp, stamp.version, find_gpus())
        return
    load("tensorrt" if engine == "tensorrt" else "tensorrt-rtx")
    if engine == "tensorrt" and not find_gpus():
        raise EngineError(
            "TensorRT builds and runs engines on an NVIDIA GPU, and none is here",
            "Run it on a GPU machine, or take --engine tensorrt-rtx, which compiles without one.",
        )


def compare_engine(subject: Subject, settings: EngineSettings, progress: Progress) -> EngineFound:
    """Build or open the engine, audit it, and run it over the same batches where a GPU can.

    Raises EngineError when it cannot be built, belongs to another plan, or fails while it runs.
    """
    engine = _opened(subject, settings, progress)
    request = request_for_plan(subject.planned, subject.typed.formats, engine.log)
    found = EngineFound(
        label=f"{engine.stamp.flavour} {engine.stamp.version}",
        versions={engine.stamp.flavour: engine.stamp.version},
        flags={f"engine {name}": value for name, value in engine.stamp.flags.items()},
        kernels=engine.kernels,
        built=built_layers(subject.planned.model, engine.kernels, request),
        findings=[*_known(engine, subject), *findings_of(audit(engine.kernels, request))],
    )
    if engine.stamp.flavour == "tensorrt-rtx" and not runs_here(settings):
        found.notes.append("built and read, not run: no GPU here runs TensorRT-RTX")
        progress.note(found.notes[-1])
        return found
    _run(subject, settings, engine, found, progress)
    return found


def runs_here(settings: EngineSettings) -> bool:
    """Whether a GPU here runs TensorRT-RTX's engines."""
    return default_target() == CURRENT and settings.compute_capability in (None, CURRENT)


def _known(engine: Engine, subject: Subject) -> list[Finding]:
    if engine.stamp.flavour != "tensorrt":  # TensorRT-RTX counts versions of its own
        return []
    build = Build(engine.stamp.version, engine.stamp.compute_capability, engine.kernels)
    return known_issue_findings(match_known_issues(build, subject.planned.model))


def _opened(subject: Subject, settings: EngineSettings, progress: Progress) -> Engine:
    model = subject.planned.model
    identity = Identity(model.sha256, plan_sha256(subject.planned.plan), settings.table_sha256)
    if settings.engine not in ("tensorrt", "tensorrt-rtx"):
        path = Path(settings.engine)
        stamp = check_stamp(path, replace(identity, table_sha256=""))
        if stamp.identity.table_sha256 != settings.table_sha256:
            progress.note(f"{path.name} was built with the scales of another table than this comparison's")
        return Engine(path, stamp, read_kernels(path), path.with_name(path.name + LOG_SUFFIX))
    save_model(subject.typed.for_engines, subject.typed.weights, subject.out / TYPED_FILE)
    progress.start(f"building with {settings.engine}", None)
    return built_engine(subject, settings, identity, ENGINE_FILE)


def built_engine(
    subject: Subject,
    settings: EngineSettings,
    identity: Identity,
    name: str,
    *,
    marks: Marks = "none",
    cached: bool = True,
) -> Engine:
    """Build TYPED_FILE of the subject's folder into `name` there. Raises EngineError."""
    flavour: Flavour = "tensorrt" if settings.engine == "tensorrt" else "tensorrt-rtx"
    onnx, path = subject.out / TYPED_FILE, subject.out / name
    profiles = profiles_for(subject.planned.model.inputs, settings.shapes, subject.feeds)
    options = BuildOptions(
        profiles=profiles,
        tf32=settings.tf32,
        opt_level=settings.opt_level,
        timing_cache=subject.out / TIMING_CACHE if cached and flavour == "tensorrt" else None,
        marks=marks,
        timeout_s=settings.timeout_s,
    )
    if flavour == "tensorrt":
        result = build_tensorrt(onnx, path, options=options, identity=identity)
    else:
        target = settings.compute_capability or default_target()
        result = build_rtx(onnx, path, compute_capability=target, options=options, identity=identity)
    stamp = check_stamp(path, identity)
    return Engine(path, stamp, result.kernels, path.with_name(path.name + LOG_SUFFIX))


def _run(
    subject: Subject, settings: EngineSettings, engine: Engine, found: EngineFound, progress: Progress
) -> None:
    """Run and time the engine, then ask whose its errors are."""
    typed = subject.typed
    reference = OnnxRuntimeRunner(subject.planned.model)
    emulation = OnnxRuntimeRunner.emulation(typed.model)
    feed = subject.feeds.first()
    with TensorRtRunner(engine.path) as runner:
        progress.start("running the engine", len(subject.feeds))
        three = Three(reference, emulation, runner)
        found.outputs = run_three(three, subject.feeds, subject.kinds, progress)
        found.checks = _self_checks(subject, engine, found, runner, reference, feed)
        shipped = runner.run(feed)
        found.latency = runner.latency(feed)
        found.kernels = timed(found.kernels, runner.kernel_times(feed))
    found.flags["engine latency"] = str(found.latency)
    extra = _extra_builds(subject, settings, engine, found, shipped, feed, progress)
    found.verdicts = _verdicts(subject, engine, found, extra, reference, feed)
    moved = _moved(found, emulation.run(feed), shipped)
    observed = {n: v for n in found.verdicts if (v := _observer(n, extra)) is not None}
    faults = fault_findings(Faults(found.verdicts, observed, moved, subject.planned.model))
    found.findings = [*faults, *found.findings]
    if settings.fusion_off:
        _try_without_fusion(subject, settings, engine, found, emulation.run(feed), shipped, feed, progress)
    reference.close()
    emulation.close()


def _try_without_fusion(
    subject: Subject,
    settings: EngineSettings,
    engine: Engine,
    found: EngineFound,
    emulated: Outputs,
    shipped: Outputs,
    feed: Feed,
    progress: Progress,
) -> None:
    def build_and_run(name: str) -> Outputs:
        progress.start(f"building with less fusion ({name})", None)
        fewer = replace(settings, opt_level=0) if name == "unfused" else settings
        marks: Marks = "all" if name == "apart" else "none"
        built = built_engine(subject, fewer, engine.stamp.identity, f"{name}.engine", marks=marks)
        with TensorRtRunner(built.path) as runner:
            return runner.run(feed)

    experiments = run_experiments(build_and_run, emulated, found.notes.append)
    finding = fusion_finding(output_gaps(emulated, shipped), experiments)
    if finding is not None:
        found.findings.insert(0, finding)


def _verdicts(
    subject: Subject, engine: Engine, found: EngineFound, extra: _Extra, reference: Runner, feed: Feed
) -> dict[str, Verdict]:
    tf32 = engine.stamp.flags.get("tf32") == "on"
    tf32_gaps = _tf32_gaps(subject, reference, feed) if tf32 and not subject.lowered else {}
    verdicts = {}
    for name in found.outputs.engine:
        gaps = found.outputs.gaps(
            name,
            noise_gap=extra.noise.get(name, 0.0),
            tf32=tf32,
            tf32_gap=tf32_gaps.get(name),
            lowered=subject.lowered,
        )
        verdicts[name] = split(gaps, [c for c in found.checks if c.output == name])
    return verdicts


@dataclass(frozen=True)
class _Extra:
    noise: Mapping[str, float]
    marked: Mapping[str, float]


def _extra_builds(
    subject: Subject,
    settings: EngineSettings,
    engine: Engine,
    found: EngineFound,
    shipped: Mapping[str, object],
    feed: Feed,
    progress: Progress,
) -> _Extra:
    """Builds beside the shipped one, on one batch: a rebuild, one with marks, one that can be listened to."""
    if settings.engine not in ("tensorrt", "tensorrt-rtx"):
        return _Extra({}, {})
    identity = engine.stamp.identity
    noise: Mapping[str, float] = {}
    marked: Mapping[str, float] = {}
    if settings.noise_floor:
        progress.start("building again without the timing cache", None)
        again = built_engine(subject, settings, identity, "rebuilt.engine", cached=False)
        noise, _ = _beside(again, shipped, feed, found, "rebuilt")
    if can_observe(engine.stamp.flavour, engine.stamp.version):
        progress.start("listening to the tensors between kernels", None)
        listening = built_engine(subject, settings, identity, "observed.engine", marks="unfused")
        found.layers = observed_layers(listening.path, subject.planned.model, subject.feeds)
    elif settings.observer:
        progress.start("building again with every tensor marked", None)
        marked = _marked(subject, settings, engine, found, shipped, feed)
        progress.note(found.notes[-1])
    return _Extra(noise, marked)


def _marked(
    subject: Subject,
    settings: EngineSettings,
    engine: Engine,
    found: EngineFound,
    shipped: Mapping[str, object],
    feed: Feed,
) -> Mapping[str, float]:
    """What marking every tensor changes. A marked build that fails costs only this answer."""
    try:
        other = built_engine(subject, settings, engine.stamp.identity, "marked.engine", marks="all")
        gaps, latency = _beside(other, shipped, feed, found, "marked")
    except EngineError as error:
        found.notes.append(f"the effect of marking is not known: {error.problem}")
        return {}
    found.notes.append(
        f"marked build: {len(other.kernels)} kernels instead of {len(engine.kernels)}, {latency}"
    )
    return gaps


def _beside(
    engine: Engine, shipped: Mapping[str, object], feed: Feed, found: EngineFound, word: str
) -> tuple[dict[str, float], Latency]:
    with TensorRtRunner(engine.path) as runner:
        gaps = output_gaps(shipped, runner.run(feed))  # type: ignore[arg-type]
        latency = runner.latency(feed)
    found.flags[f"{word} build"] = f"{len(engine.kernels)} kernels, {latency.median_ms:.4g} ms"
    return gaps, latency


def _self_checks(
    subject: Subject, engine: Engine, found: EngineFound, runner: Runner, reference: Runner, feed: Feed
) -> list[SelfCheck]:
    tf32 = 2.0**-11 if engine.stamp.flags.get("tf32") == "on" else 0.0
    format_gap = max(map(rel_l2_of, found.outputs.format.values()), default=0.0)
    return self_checks(
        runner.run,
        feed,
        tolerance_rel_l2=engine_rules().row_tolerance(max(subject.unit_roundoff, tf32), format_gap),
        reference=reference.run,
        sizes=legal_sizes(engine.stamp, subject.planned.model, feed),
    )


def legal_sizes(stamp: Stamp, model: Model, feed: Feed) -> tuple[int, ...]:
    """Batch sizes that the engine takes: smallest, middle and largest that every input's profile allows."""
    low, high = 1, 1 << 30
    for name, array in feed.items():
        if not array.ndim or name not in model.inputs:
            continue
        shapes = stamp.profiles.get(name)
        size = int(array.shape[0])
        low = max(low, shapes[0][0] if shapes else size)
        high = min(high, shapes[2][0] if shapes else size)
    sizes = {low, (low + high) // 2, high} if high < 1 << 30 else {low}
    return tuple(sorted(size for size in sizes if low <= size <= high))


def _tf32_gaps(subject: Subject, reference: Runner, feed: Feed) -> dict[str, float]:
    try:
        emulated = OnnxRuntimeRunner(emulate_tf32(subject.planned.model, subject.planned.types))
    except EngineError:
        return {}
    return output_gaps(reference.run(feed), emulated.run(feed))


def _moved(
    found: EngineFound, emulated: Mapping[str, object], shipped: Mapping[str, object]
) -> dict[str, Layout]:
    """Where the engine is to blame: is it the places of its values?"""
    moved = {}
    for name, verdict in found.verdicts.items():
        if verdict.kind in ("engine-defect", "batch-or-shape", "unclear"):
            layout = fingerprint(emulated[name], shipped[name])  # type: ignore[arg-type]
            if layout is not None:
                moved[name] = layout
    return moved


def _observer(name: str, extra: _Extra) -> Verdict | None:
    gap, noise = extra.marked.get(name), extra.noise.get(name, 0.0)
    return observer_verdict(Gaps(0.0, 0.0, 0.0, noise_gap=noise, marked_gap=gap))
