"""Reads an engine file by loading it, in a child process, on the GPU that it was built for."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from diag.engines.build import WORKER, worker_environment
from diag.engines.tensorrt import Flavour
from diag.errors import EngineError
from diag.kernels.inspector import kernels_from_json
from diag.kernels.kernel import Kernel

_TIMEOUT_S = 300.0


def flavour_of(engine: str | Path) -> Flavour:
    """Which TensorRT wrote an engine file, from its first bytes (`ftrt`, or `vtrt` for TensorRT-RTX)."""
    with Path(engine).open("rb") as stream:
        return "tensorrt-rtx" if stream.read(1) == b"v" else "tensorrt"


def load_kernels(engine: str | Path, worker: Sequence[str] = WORKER) -> tuple[Kernel, ...]:
    """Kernels of an engine that has no files beside it. Raises EngineError when it cannot be loaded here."""
    flavour = flavour_of(engine)
    name = f"engine {str(engine)!r}"
    with tempfile.TemporaryDirectory(prefix="trtdiag-inspect-") as scratch:
        out = Path(scratch) / "inspector.json"
        command = [*worker, "--inspect", flavour, str(Path(engine).resolve()), str(out)]
        outcome = _ask(command, name)
        if outcome["problem"]:
            raise EngineError(f"{name} cannot be read: {outcome['problem']}", outcome["hint"])
        return kernels_from_json(out.read_text(encoding="utf-8"), name)


def _ask(command: Sequence[str], name: str) -> dict[str, str]:
    try:
        child = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=worker_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{name} was not loaded within {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise EngineError(f"no process can be started to load {name}: {error.strerror or error}") from error
    try:
        outcome: dict[str, str] = json.loads(child.stdout.strip().splitlines()[-1])
        return {"problem": outcome["problem"], "hint": outcome["hint"]}
    except (ValueError, IndexError, KeyError, TypeError):
        raise EngineError(
            f"loading {name} ended the process with status {child.returncode}",
            "It was built by another version or for another GPU, or it is damaged.",
        ) from None
