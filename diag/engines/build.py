"""Builds engines in child processes: a builder can take its process down, or never come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diag.engines.gpu import find_gpus
from diag.engines.stamp import Identity, Stamp, sha256_of, write_stamp
from diag.engines.tensorrt import BuildRequest, Flavour, Marks, Shape
from diag.engines.weak import WeakTyping
from diag.errors import DataError, EngineError
from diag.files import output_folder
from diag.kernels.kernel import Kernel
from diag.kernels.read import INSPECTOR_SUFFIX, LOG_SUFFIX, read_kernels

WORKER = (sys.executable, "-P", "-m", "diag.engines.build_worker")
"""`-P` keeps the caller's folder off the import path, where a file of the user's could pose as a library."""

FAILED_LOG_SUFFIX = ".failed.log"
"""A build that failed leaves `<engine>.failed.log`."""

_LISTED_REFUSALS = 20
_NO_GPU = (
    "This needs an NVIDIA GPU and its driver; without one, name the compute capability to build for, and "
    "leave --refit out."
)
_HINTS = {
    "CUDA driver version is insufficient": _NO_GPU,
    "CHECK(status == CUDA_SUCCESS) failed": _NO_GPU,
    "libnvinfer_lean": "The lean runtime is not installed: leave --version-compatible out.",
    "out of memory": "Lower --workspace-mb or the largest shapes, or free the GPU's memory.",
}
"""Words of the log's last error, and what mends it."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a user may choose about a build, whichever TensorRT does it."""

    profiles: Mapping[str, tuple[Shape, Shape, Shape]] = field(default_factory=dict)
    """Smallest, usual and largest shape of each dynamic input."""
    tf32: bool = True
    """TensorRT's own default; Polygraphy's is False. The stamp says which."""
    opt_level: int | None = None
    workspace_bytes: int | None = None
    flags: tuple[str, ...] = ()
    """Names of further builder flags: VERSION_COMPATIBLE, REFIT, EDITABLE_TIMING_CACHE, ..."""
    timing_cache: Path | None = None
    """Read when it exists and written after the build; share one over a sweep. TensorRT only."""
    marks: Marks = "none"
    weak: WeakTyping | None = None
    """Weak typing, TensorRT 10 and older only."""
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class BuildResult:
    """An engine and what was read back from it. Paths are None where nothing was kept."""

    engine_path: Path | None
    log_path: Path | None
    inspector_path: Path | None
    seconds: float
    """What the builder itself took."""
    wall_seconds: float
    """What the caller waited: starting the child, loading the library and parsing included."""
    engine_bytes: int
    version: str
    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...] = ()


def build_rtx(
    onnx_path: str | Path,
    out_path: str | Path | None = None,
    *,
    compute_capability: str = "SM89",
    options: BuildOptions | None = None,
    identity: Identity | None = None,
    worker: Sequence[str] = WORKER,
) -> BuildResult:
    """Compile ahead of time with TensorRT-RTX; needs no GPU.

    Without `out_path` only the kernels are wanted and no file stays. `compute_capability` names the target
    (SM75, SM80, SM86, SM89, SM120, SM121), or CURRENT for the GPU that is here.
    Raises EngineError when the wheel is missing, the parser refuses a node, the builder fails, crashes or
    takes longer than the limit.
    """
    options = options or BuildOptions()
    if options.timing_cache is not None:
        raise EngineError("TensorRT-RTX chooses tactics at run time and has no timing cache when it builds")
    if options.weak is not None:
        raise EngineError("TensorRT-RTX has no weak typing", "Build without --weak, or with TensorRT 10.")
    request = _request("tensorrt-rtx", onnx_path, out_path, options)
    request = replace(request, compute_capability=compute_capability)
    return _run(request, out_path, options, identity, worker, inspects=compute_capability == "CURRENT")


def build_tensorrt(
    onnx_path: str | Path,
    out_path: str | Path | None = None,
    *,
    options: BuildOptions | None = None,
    identity: Identity | None = None,
    worker: Sequence[str] = WORKER,
) -> BuildResult:
    """Build a strongly typed engine with TensorRT 10.6 or later on the GPU that is here.

    Raises EngineError as `build_rtx` does, and when there is no usable GPU.
    """
    options = options or BuildOptions()
    request = _request("tensorrt", onnx_path, out_path, options)
    return _run(request, out_path, options, identity, worker, inspects=True)


def _request(
    flavour: Flavour, onnx_path: str | Path, out_path: str | Path | None, options: BuildOptions
) -> BuildRequest:
    if not Path(onnx_path).is_file():
        raise EngineError(f"model {str(onnx_path)!r} does not exist")
    return BuildRequest(
        flavour=flavour,
        onnx_path=str(Path(onnx_path).resolve()),
        engine_path="" if out_path is None else str(Path(out_path).resolve()),
        profiles=dict(options.profiles),
        tf32=options.tf32,
        opt_level=options.opt_level,
        workspace_bytes=options.workspace_bytes,
        flags=options.flags,
        timing_cache="" if options.timing_cache is None else str(options.timing_cache.resolve()),
        marks=options.marks,
        weak=options.weak,
    )


def _run(
    request: BuildRequest,
    out_path: str | Path | None,
    options: BuildOptions,
    identity: Identity | None,
    worker: Sequence[str],
    *,
    inspects: bool,
) -> BuildResult:
    with tempfile.TemporaryDirectory(prefix="trtdiag-build-") as scratch:
        base = Path(scratch) / "engine" if out_path is None else Path(out_path).resolve()
        output_folder(base.parent)
        log = base.with_name(base.name + LOG_SUFFIX)
        inspector = base.with_name(base.name + INSPECTOR_SUFFIX)
        if inspects:
            request = replace(request, inspector_path=str(inspector))
        # An older engine and its log stay together until this build has succeeded.
        attempt = base.with_name(base.name + FAILED_LOG_SUFFIX)
        started = time.perf_counter()
        outcome = _supervise(request, attempt, Path(scratch) / "outcome.json", options.timeout_s, worker)
        wall = time.perf_counter() - started
        attempt.replace(log)
        if not inspects:
            inspector.unlink(missing_ok=True)  # an older build's
        kernels = _kernels(inspector if inspects else log)
        kept = out_path is not None
        result = BuildResult(
            engine_path=base if kept else None,
            log_path=log if kept else None,
            inspector_path=inspector if kept and inspects else None,
            seconds=float(outcome["seconds"]),
            wall_seconds=wall,
            engine_bytes=int(outcome["engine_bytes"]),
            version=str(outcome["version"]),
            kernels=kernels,
            notes=tuple(outcome.get("notes", ())),
        )
    if result.engine_path is not None:
        write_stamp(result.engine_path, _stamp(request, result, identity or Identity()))
    return result


def _kernels(path: Path) -> tuple[Kernel, ...]:
    try:
        return read_kernels(path)
    except DataError as error:
        raise EngineError(f"the build succeeded and told no kernels: {error.problem}", error.hint) from error


def _stamp(request: BuildRequest, result: BuildResult, identity: Identity) -> Stamp:
    assert result.engine_path is not None
    gpu = next(iter(find_gpus()), None) if request.inspector_path else None
    flags = {
        "tf32": "on" if request.tf32 else "off",
        "opt_level": "default" if request.opt_level is None else str(request.opt_level),
        "workspace_bytes": "default" if request.workspace_bytes is None else str(request.workspace_bytes),
        "marks": request.marks,
        "typing": "weak: " + ", ".join(request.weak.formats) if request.weak else "strong",
        **dict.fromkeys(request.flags, "on"),
    }
    return Stamp(
        engine_sha256=sha256_of(result.engine_path),
        identity=identity,
        flavour=request.flavour,
        version=result.version,
        compute_capability=gpu.compute_capability if gpu else request.compute_capability,
        gpu=gpu.name if gpu else "",
        flags=flags,
        profiles={name: [list(shape) for shape in shapes] for name, shapes in request.profiles.items()},
        timing_cache_sha256=sha256_of(Path(request.timing_cache)) if request.timing_cache else "",
        log=result.log_path.name if result.log_path else "",
        kernels=len(result.kernels),
    )


def _supervise(
    request: BuildRequest, log: Path, outcome_path: Path, timeout_s: float, worker: Sequence[str]
) -> dict[str, Any]:
    """Run the child to its end; give what it reported. Raises EngineError for all that can go wrong."""
    message = json.dumps({**asdict(request), "outcome_path": str(outcome_path)})
    name = request.flavour
    with log.open("wb") as stream:
        try:
            child = subprocess.run(
                list(worker),
                input=message.encode(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                env=worker_environment(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"the {name} build was stopped after its limit of {timeout_s:g} s{_log_note(request, log)}",
                "Raise the limit, lower the builder's optimisation level, or use a timing cache.",
            ) from error
        except OSError as error:
            raise EngineError(f"the build process cannot be started: {error.strerror or error}") from error
    outcome = _outcome(outcome_path) if child.returncode == 0 else None
    if outcome is None:
        raise EngineError(*_crash(name, child.returncode, request, log))
    if outcome["problem"]:
        raise EngineError(*_failure(name, outcome, request, log))
    return outcome


def _outcome(path: Path) -> dict[str, Any] | None:
    try:
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # it ended before it could say anything
    return outcome


def worker_environment() -> dict[str, str]:
    """The child finds this package where the caller found it."""
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


def _crash(name: str, status: int, request: BuildRequest, log: Path) -> tuple[str, str]:
    if status < 0:
        how = f"was killed by {_signal_name(-status)}"
        hint = "A builder that crashes is a defect of that version: report it with the log, or try another."
        if -status == signal.SIGKILL:
            hint = "Most often the machine ran out of memory."
    else:
        how = f"ended with status {status}"
        hint = "The log's last lines say why."
    return f"the {name} build process {how}{_log_note(request, log)}", hint


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _failure(name: str, outcome: Mapping[str, Any], request: BuildRequest, log: Path) -> tuple[str, str]:
    refusals = outcome["refusals"]
    if refusals:
        return (
            f"{name} {outcome['version']} refuses {len(refusals)} of the model's nodes:{_listed(refusals)}",
            "Rewrite these nodes, keep them out of the exported model, or register their plugin.",
        )
    if not outcome["version"]:  # it was not even loaded
        return outcome["problem"], outcome["hint"]
    hint = outcome["hint"]
    note = "" if hint else _log_note(request, log)
    hint = hint or next((mend for words, mend in _HINTS.items() if words in note), "")
    return f"{name} {outcome['version']}: {outcome['problem']}{note}", hint


def _listed(refusals: Sequence[Mapping[str, str]]) -> str:
    lines = [f"\n  {r['node'] or '(unnamed)'} ({r['op_type']}): {r['reason']}" for r in refusals]
    if len(lines) > _LISTED_REFUSALS:
        lines[_LISTED_REFUSALS:] = [f"\n  ... and {len(lines) - _LISTED_REFUSALS} more"]
    return "".join(lines)


def _log_note(request: BuildRequest, log: Path) -> str:
    """The log's last error, and where the log is when it stays."""
    last = ""
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("[ERROR]", "[INTERNAL_ERROR]", "Fatal Python error")):
                last = line.strip()
    note = f"; its last error: {last[:300]}" if last else ""
    return note + (f"; the log is {str(log)!r}" if request.engine_path else "")
