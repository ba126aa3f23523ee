"""Runs a command as a process of its own and measures it: wall time, peak memory, how it ended.

Linux counts what a process holds before it starts a child as the child's peak too. So this file is also a
small launcher (standard library only, about 10 MB) that stands between the caller and the command.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_KIB_PER_MB = 1e6 / 1024
_STARVED = ("MemoryError", "bad_alloc", "Unable to allocate", "Failed to allocate", "bad allocation")


@dataclass(frozen=True)
class Limits:
    """Where a run is given up, so that a peer that eats the machine does not take it down."""

    seconds: float
    memory_gb: float
    """Address space of the process (RLIMIT_AS), so a little more than what is resident."""


@dataclass(frozen=True)
class Measured:
    """One run. `detail`: the JSON object that the process printed last; the reason where it ended early."""

    status: str
    """ok, failed, timeout, memory."""
    wall_s: float
    peak_mb: float
    detail: Mapping[str, object]


def measured(command: Sequence[str], limits: Limits, folder: Path) -> Measured:
    """Run `command` in `folder`. Peak memory is the largest resident set of the process or its children."""
    launcher = [sys.executable, __file__, str(limits.seconds), str(limits.memory_gb)]
    done = subprocess.run([*launcher, *command], cwd=folder, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return Measured(found["status"], found["wall_s"], found["peak_mb"], found["detail"])


def _launch(command: Sequence[str], limits: Limits) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        _limit_memory(process.pid, limits.memory_gb)
        expired = threading.Event()
        timer = threading.Timer(limits.seconds, _end, (process.pid, expired))
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:  # the command has a session of its own and would run on
            _end(process.pid, expired)
            raise
        finally:
            timer.cancel()
        wall_s = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)  # it is reaped: Popen must not wait again
        text, complaint = _text(out), _text(err)
    ended = "timeout" if expired.is_set() else _ending(process.returncode, complaint)
    detail = {**_last_object(text), **({} if ended == "ok" else {"reason": _last_line(complaint)})}
    return {"status": ended, "wall_s": wall_s, "peak_mb": usage.ru_maxrss / _KIB_PER_MB, "detail": detail}


def _limit_memory(process: int, gigabytes: float) -> None:
    """From outside, when the process has just begun: between fork and exec it would need a slow fork."""
    limit = int(gigabytes * 1e9)
    with suppress(ProcessLookupError):
        resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))


def _end(group: int, expired: threading.Event) -> None:
    expired.set()
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _ending(code: int, complaint: str) -> str:
    if code == 0:
        return "ok"
    starved = code == -signal.SIGKILL or any(sign in complaint for sign in _STARVED)
    return "memory" if starved else "failed"


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][:2000]


def _last_object(text: str) -> Mapping[str, object]:
    try:
        found = json.loads((text.strip().splitlines() or [""])[-1])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    print(json.dumps(_launch(sys.argv[3:], Limits(float(sys.argv[1]), float(sys.argv[2])))))
