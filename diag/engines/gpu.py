"""The NVIDIA GPUs of this machine, as their driver tells them. Needs no CUDA library."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU as its driver tells it."""

    name: str
    compute_capability: str
    memory: str
    driver: str


def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that nvidia-smi lists; none when there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = ([field.strip() for field in line.split(",")] for line in answer.stdout.splitlines())
    return tuple(Gpu(*row) for row in rows if len(row) == 4)
