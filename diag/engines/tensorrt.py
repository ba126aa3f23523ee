"""The only module that imports TensorRT: `tensorrt` and `tensorrt_rtx` have one API and share one code path.

Nothing is imported until a function is called. Building belongs in a child process (`diag.engines.build`): a
builder can take the process down.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from diag.engines import weak as weak_typing
from diag.engines.weak import WeakTyping
from diag.errors import EngineError, TrtdiagError
from diag.files import replacing, write_text

Flavour = Literal["tensorrt", "tensorrt-rtx"]
Marks = Literal["none", "unfused", "all"]
Shape = tuple[int, ...]

MODULES: Mapping[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
OPT_LEVELS = range(6)
OLDEST = (10, 6)
"""Oldest TensorRT that is built with; TensorRT-RTX counts its own versions."""

INSTALL: Mapping[Flavour, str] = {
    "tensorrt": 'pip install "trtdiag[tensorrt]" --extra-index-url https://pypi.nvidia.com',
    "tensorrt-rtx": 'pip install "trtdiag[rtx]"',
}


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What a build needs to know; plain values, so that it crosses a process border as JSON."""

    flavour: Flavour
    onnx_path: str
    engine_path: str = ""
    """Where the engine goes; empty when only the kernels matter."""
    inspector_path: str = ""
    """Where the inspector's JSON goes; empty when there is no GPU that can load the engine."""
    compute_capability: str = ""
    """TensorRT-RTX's target, `SM89` for example; empty for the GPU that is here."""
    profiles: Mapping[str, tuple[Shape, Shape, Shape]] = field(default_factory=dict)
    tf32: bool = True
    opt_level: int | None = None
    workspace_bytes: int | None = None
    flags: tuple[str, ...] = ()
    """Names of further builder flags, `VERSION_COMPATIBLE` or `REFIT` for example."""
    timing_cache: str = ""
    marks: Marks = "none"
    """Which tensors can be read at run time besides the outputs; `all` changes the fusion."""
    weak: WeakTyping | None = None
    """Precision by flags and pins instead of by the model's types; TensorRT 10 and older only."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One ONNX node that the parser does not take."""

    node: str
    op_type: str
    reason: str


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """What the child reports: times and sizes, or why there is no engine."""

    version: str
    seconds: float = 0.0
    engine_bytes: int = 0
    problem: str = ""
    hint: str = ""
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    """What the user should know of a build that succeeded."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load(flavour: Flavour, oldest: tuple[int, int] = OLDEST) -> Any:
    """The TensorRT module. Raises EngineError with the line that installs it."""
    try:
        trt = importlib.import_module(MODULES[flavour])
    except (ImportError, OSError) as error:
        raise EngineError(
            f"{flavour} cannot be imported: {error}", f"Install it: {INSTALL[flavour]}"
        ) from error
    if not hasattr(trt, "Builder"):
        raise EngineError(
            f"the package {MODULES[flavour]!r} holds no TensorRT", f"Install it: {INSTALL[flavour]}"
        )
    if flavour == "tensorrt" and version_of(trt) < oldest:
        raise EngineError(
            f"TensorRT {trt.__version__} is too old; {oldest[0]}.{oldest[1]} or later is needed",
            f"Install it: {INSTALL[flavour]}",
        )
    return trt


def version_of(trt: Any) -> tuple[int, int]:
    """Major and minor version of a TensorRT module."""
    major, minor = str(trt.__version__).split(".")[:2]
    return int(major), int(minor)


def make_logger(trt: Any, write: Callable[[str], object]) -> Any:
    """A TensorRT logger that hands on every message, VERBOSE ones included, as `[SEVERITY] text`."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base class is known only at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # pybind11 wants the base called by name

        def log(self, severity: Any, text: str) -> None:
            write(f"[{severity.name}] {text}\n")

    return Logger()


def build(request: BuildRequest, write_log: Callable[[str], object]) -> BuildOutcome:
    """Build in this process. Problems that a user can mend come back in the outcome, never as exceptions."""
    version = ""
    try:
        trt = load(request.flavour, weak_typing.OLDEST if request.weak else OLDEST)
        version = str(trt.__version__)
        if request.weak:
            weak_typing.refuse(trt, version_of(trt))
        logger = make_logger(trt, write_log)
        builder = _builder(trt, logger, request.flavour)
        network, refusals = _parse(trt, logger, builder, request)
        if refusals:
            return BuildOutcome(version, problem="the parser refuses the model", refusals=refusals)
        _mark(network, request.marks)
        config = _config(trt, builder, network, request)
        notes, calibrator = (
            weak_typing.apply(trt, network, config, request.weak) if request.weak else ((), None)
        )
        started = time.perf_counter()
        plan = builder.build_serialized_network(network, config)
        seconds = time.perf_counter() - started
        problem = getattr(calibrator, "problem", "")  # TensorRT builds on with what was fed until then
        if plan is None or problem:
            problem = problem or "the builder found no engine for the model"
            return BuildOutcome(version, seconds, problem=problem)
        _keep(trt, logger, plan, config, request)
        return BuildOutcome(version, seconds, int(plan.nbytes), notes=notes)
    except TrtdiagError as error:
        return BuildOutcome(version, problem=error.problem, hint=error.hint)


def _builder(trt: Any, logger: Any, flavour: Flavour) -> Any:
    try:
        return trt.Builder(logger)
    except TypeError as error:  # pybind11's way of saying that the factory gave nothing
        raise EngineError(
            f"{flavour} {trt.__version__} finds no usable NVIDIA GPU and driver, which it needs to build",
            "Run it on a GPU machine, or build with --engine tensorrt-rtx, which needs none.",
        ) from error


def _parse(trt: Any, logger: Any, builder: Any, request: BuildRequest) -> tuple[Any, tuple[Refusal, ...]]:
    # TensorRT 11 knows nothing but strong typing, TensorRT 10 nothing but explicit batches.
    kind = "EXPLICIT_BATCH" if request.weak else "STRONGLY_TYPED"
    flag = getattr(trt.NetworkDefinitionCreationFlag, kind, None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(request.onnx_path):
        return network, ()
    refusals = tuple(_refusal(parser.get_error(i)) for i in range(parser.num_errors))
    return network, refusals or (Refusal("", "", "the file is not a model that TensorRT can read"),)


def _refusal(error: Any) -> Refusal:
    text = str(error.desc()).strip()
    # The parser quotes its own source; the line that says what is wrong comes after the echo of the node.
    lines = [line for line in text.splitlines() if not line.startswith("Invalid Node")]
    reason = lines[0] if lines else text
    if "Plugin not found" in text:
        reason = "no such operator, and no plugin of that name is registered"
    elif reason in ("", "false"):
        reason = "the operator is not supported"
    node, operator = (getattr(error, name, str)() for name in ("node_name", "node_operator"))  # not in 8.6
    return Refusal(str(node), str(operator), reason)


def _mark(network: Any, marks: Marks) -> None:
    if marks == "unfused":
        if not hasattr(network, "mark_unfused_tensors_as_debug_tensors"):
            raise EngineError("this TensorRT cannot mark unfused tensors", "TensorRT 10.12 or later can.")
        network.mark_unfused_tensors_as_debug_tensors()
    elif marks == "all":
        _mark_all_outputs(network)


def _mark_all_outputs(network: Any) -> None:
    taken = {network.get_output(i).name for i in range(network.num_outputs)}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "CONSTANT":
            continue  # 10.6 folds a quantizer's scale into it and then fails on the mark
        for slot in range(layer.num_outputs):
            tensor = layer.get_output(slot)
            if tensor is None or tensor.is_shape_tensor or tensor.name in taken:
                continue
            if tensor.dtype.name in ("FLOAT", "HALF", "BF16"):
                taken.add(tensor.name)
                network.mark_output(tensor)


def _config(trt: Any, builder: Any, network: Any, request: BuildRequest) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    _switch(config, trt.BuilderFlag.TF32, request.tf32)
    for name in request.flags:
        if not hasattr(trt.BuilderFlag, name):
            raise EngineError(f"{request.flavour} {trt.__version__} has no builder flag {name!r}")
        config.set_flag(getattr(trt.BuilderFlag, name))
    if request.opt_level is not None:
        if request.opt_level not in OPT_LEVELS:
            raise EngineError(
                f"optimisation level {request.opt_level} does not exist", "It goes from 0 to 5."
            )
        config.builder_optimization_level = request.opt_level
    if request.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace_bytes)
    if request.compute_capability:
        _set_target(trt, config, request.compute_capability)
    if request.timing_cache:
        _use_timing_cache(config, Path(request.timing_cache))
    profile = _profile(builder, network, request.profiles)
    if profile is not None and config.add_optimization_profile(profile) < 0:
        raise EngineError(
            "the optimisation profile is refused", "Check that min <= opt <= max for every shape."
        )
    return config


def _switch(config: Any, flag: Any, on: bool) -> None:
    if on:
        config.set_flag(flag)
    else:
        config.clear_flag(flag)


def _use_timing_cache(config: Any, file: Path) -> None:
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise EngineError(
            f"timing cache {str(file)!r} is damaged, or of another TensorRT version or GPU",
            "Delete it, or name another file.",
        )


def _set_target(trt: Any, config: Any, name: str) -> None:
    target = getattr(getattr(trt, "ComputeCapability", None), name, None)
    if target is None:
        known = [n for n in dir(getattr(trt, "ComputeCapability", None)) if n.startswith("SM")]
        raise EngineError(
            f"{name!r} is no compute capability that TensorRT {trt.__version__} can build for",
            f"It knows {', '.join(sorted(known))}." if known else "Only TensorRT-RTX builds ahead of time.",
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(target, 0)


def _profile(builder: Any, network: Any, shapes: Mapping[str, tuple[Shape, Shape, Shape]]) -> Any:
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    unknown = set(shapes) - {t.name for t in tensors}
    if unknown:
        raise EngineError(f"shapes are given for {sorted(unknown)}, which are no inputs of the model")
    dynamic = [t for t in tensors if -1 in tuple(t.shape)]
    if not dynamic:
        return None
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        if tensor.name not in shapes:
            raise EngineError(
                f"input {tensor.name!r} has dynamic shape {tuple(tensor.shape)}, and none is given for it",
                "Give its smallest, usual and largest shape.",
            )
        try:
            profile.set_shape(tensor.name, *shapes[tensor.name])
        except (ValueError, RuntimeError) as error:
            raise EngineError(f"shapes of input {tensor.name!r} are refused: {error}") from error
    return profile


def _keep(trt: Any, logger: Any, plan: Any, config: Any, request: BuildRequest) -> None:
    if request.timing_cache:
        with replacing(Path(request.timing_cache)) as partial:
            partial.write_bytes(memoryview(config.get_timing_cache().serialize()))
    if request.inspector_path:
        write_text(_inspect(trt, logger, plan), Path(request.inspector_path))
    if request.engine_path:
        with replacing(Path(request.engine_path)) as partial:
            partial.write_bytes(memoryview(plan))


def _inspect(trt: Any, logger: Any, plan: Any) -> str:
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise EngineError(
            f"TensorRT {trt.__version__} cannot load the engine on this machine",
            "It was built by another version, or for another GPU.",
        )
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def inspect_engine(path: str | Path, flavour: Flavour, write_log: Callable[[str], object]) -> str:
    """The inspector's JSON of an engine file; needs the GPU it was built for.

    Raises EngineError when the engine cannot be loaded here.
    """
    trt = load(flavour)
    try:
        return _inspect(trt, make_logger(trt, write_log), Path(path).read_bytes())
    except (TypeError, OSError) as error:
        raise EngineError(f"engine {str(path)!r} cannot be loaded: {error}") from error


def try_here(flavour: Flavour) -> dict[str, Any]:
    """Version, and whether a builder can be made here; for `trtdiag doctor`, in a child process."""
    trt = load(flavour)
    try:
        builds = trt.Builder(make_logger(trt, lambda text: None)) is not None
    except TypeError:
        builds = False
    return {"version": str(trt.__version__), "builds": builds}
