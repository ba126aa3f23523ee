"""Which engines can be used on this machine, and the line that installs what is missing: `trtdiag doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diag.engines.build import WORKER, worker_environment
from diag.engines.gpu import Gpu, find_gpus
from diag.engines.tensorrt import INSTALL, MODULES, Flavour

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine or helper: whether it is usable here, what it can do, and what would mend it."""

    name: str
    usable: bool
    version: str = ""
    can: str = ""
    """What works here, in words."""
    missing: str = ""
    """What does not work and why; empty when all does."""
    install: str = ""
    """The line to type; empty when nothing is missing that a line could install."""


def probe(worker: Sequence[str] = WORKER) -> tuple[EngineStatus, ...]:
    """Look at every engine. Takes seconds: TensorRT is imported in a child process, since it may crash."""
    gpus = find_gpus()
    return (
        _emulate(),
        _rtx(gpus, worker),
        _tensorrt(gpus, worker),
        _gpu(gpus),
        _package(
            "torch", "torch", "keeps comparisons on the GPU, exports modules", 'pip install "trtdiag[torch]"'
        ),
        _package("polygraphy", "polygraphy", "reads saved inputs and data loaders", "pip install polygraphy"),
    )


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _emulate() -> EngineStatus:
    install = "pip install onnxruntime"
    if not _installed("onnxruntime"):
        return EngineStatus("emulate", False, missing="ONNX Runtime is not installed", install=install)
    version = _version("onnxruntime", "onnxruntime-gpu")
    return EngineStatus("emulate", True, version, "reference and emulation in every format, on the CPU")


def _package(name: str, module: str, can: str, install: str) -> EngineStatus:
    if not _installed(module):
        return EngineStatus(name, False, missing="not installed", install=install)
    return EngineStatus(name, True, _version(module), can)


def _rtx(gpus: Sequence[Gpu], worker: Sequence[str]) -> EngineStatus:
    answer = _ask("tensorrt-rtx", worker)
    if "problem" in answer or not answer["builds"]:
        return _unusable("tensorrt-rtx", answer, "its builder cannot be made")
    can = "builds and reads kernels without a GPU"
    runnable = [gpu.name for gpu in gpus if runs_rtx(gpu.compute_capability)]
    if runnable:
        return EngineStatus("tensorrt-rtx", True, answer["version"], f"{can}; runs on {runnable[0]}")
    missing = "cannot run: it needs an NVIDIA GPU of compute capability 7.5, 8.0, 8.6, 8.9 or 12.x"
    return EngineStatus("tensorrt-rtx", True, answer["version"], can, missing)


def runs_rtx(compute_capability: str) -> bool:
    """Whether TensorRT-RTX runs engines on GPUs of this compute capability."""
    return compute_capability in ("7.5", "8.0", "8.6", "8.9") or compute_capability.startswith("12.")


def _tensorrt(gpus: Sequence[Gpu], worker: Sequence[str]) -> EngineStatus:
    answer = _ask("tensorrt", worker)
    if "problem" in answer:
        return _unusable("tensorrt", answer, "")
    if not answer["builds"]:
        why = "its builder cannot be made (driver too old, or libraries missing)" if gpus else "no NVIDIA GPU"
        return EngineStatus("tensorrt", False, answer["version"], missing=f"cannot build or run: {why}")
    where = gpus[0].name if gpus else "this machine"
    return EngineStatus("tensorrt", True, answer["version"], f"builds and runs on {where}")


def _unusable(flavour: Flavour, answer: dict[str, Any], otherwise: str) -> EngineStatus:
    missing = str(answer.get("problem", otherwise))
    return EngineStatus(
        flavour, False, str(answer.get("version", "")), missing=missing, install=INSTALL[flavour]
    )


def _ask(flavour: Flavour, worker: Sequence[str]) -> dict[str, Any]:
    """What a child process that imports the flavour says of it; a `problem` when it cannot."""
    if not _installed(MODULES[flavour]):
        return {"problem": "not installed"}
    try:
        child = subprocess.run(
            [*worker, "--probe", flavour],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=worker_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"importing it did not end within {_TIMEOUT_S:g} s"}
    except OSError as error:
        return {"problem": f"no process can be started: {error.strerror or error}"}
    try:
        answer = json.loads(child.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if child.returncode != 0 or not isinstance(answer, dict):
        return {"problem": f"importing it ended the process with status {child.returncode}"}
    return answer


def _gpu(gpus: Sequence[Gpu]) -> EngineStatus:
    if gpus:
        names = ", ".join(f"{gpu.name} ({gpu.compute_capability}, {gpu.memory})" for gpu in gpus)
        return EngineStatus("gpu", True, f"driver {gpus[0].driver}", names)
    if shutil.which("nvidia-smi"):
        return EngineStatus("gpu", False, missing="the NVIDIA driver is installed and finds no GPU")
    return EngineStatus(
        "gpu",
        False,
        missing="no NVIDIA driver; needed only to run engines, and for TensorRT itself to build",
        install="sudo apt install ubuntu-drivers-common && sudo ubuntu-drivers install",
    )
