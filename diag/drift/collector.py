"""What a profiler does behind the caller's back: a bounded queue, one worker, files that take turns."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.drift.accumulate import count_batch, requests_of
from diag.drift.merge import Merger
from diag.drift.stats import Source, Stats
from diag.drift.stats_file import write_stats

Array = NDArray[Any]
Arrays = Mapping[str, Array]

_ERROR_LENGTH = 200


@dataclass(frozen=True, slots=True)
class CollectorOptions:
    """Bounds of a profiler."""

    rate: float = 0.01
    """Share of the calls that are counted."""
    rotate_s: float = 3600.0
    """A file is written so often, and when the profiler is closed."""
    queue_calls: int = 64
    """Calls that may wait to be counted; further ones are dropped."""
    memory_mb: float = 256.0
    """Memory that waiting calls may hold."""
    seed: int | None = None
    """Makes the choice of calls repeatable."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that was chosen."""

    inputs: dict[str, Array]
    values: dict[str, Array]
    label: str
    when: float
    requests: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.inputs.values(), *self.values.values()))


class Collector:
    """Counts calls in a thread of its own and writes statistics files. None of its methods raises."""

    def __init__(
        self,
        like: Stats,
        folder: Path,
        options: CollectorOptions,
        complete: Callable[[Call], Arrays] | None = None,
    ) -> None:
        """`complete`: computes, in the worker, what else is to be counted of a call."""
        self._like, self._folder, self._options, self._complete = like, folder, options, complete
        self._queue: queue.Queue[Call | None] = queue.Queue(options.queue_calls)
        self._lock = threading.Lock()
        self._random = random.Random(options.seed)
        self._window = Source()
        self._merger = Merger(like)
        self._number = self._files = self._waiting = 0
        self._worker = threading.Thread(target=self._work, name="trtdiag-profiler", daemon=True)
        self._worker.start()

    def chosen(self, requests: int) -> str | None:
        """Register a call that went by; its label if it is to be counted, else None."""
        with self._lock:
            self._number += requests
            number = self._number
            self._window = dataclasses.replace(self._window, seen=self._window.seen + requests)
            if self._random.random() >= self._options.rate:
                return None
        return f"{_timestamp(time.time())}-{os.getpid()}-{number}"

    def put(self, call: Call) -> None:
        """Have a call counted, or dropped when there is no room. Never waits."""
        size = call.nbytes
        with self._lock:
            room = self._waiting + size <= self._options.memory_mb * 1e6
            self._waiting += size if room else 0
        if room:
            try:
                self._queue.put_nowait(call)
                return
            except queue.Full:
                with self._lock:
                    self._waiting -= size
        with self._lock:
            self._window = dataclasses.replace(self._window, dropped=self._window.dropped + call.requests)

    def failed(self, error: BaseException, requests: int) -> None:
        """Register calls that could not be counted, and why."""
        said = " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_LENGTH]
        with self._lock:
            self._window = dataclasses.replace(
                self._window, errors=self._window.errors + requests, last_error=said
            )

    def close(self, timeout_s: float) -> None:
        """Count what waits, write the last file, end the worker."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._worker.join(timeout_s)

    def _work(self) -> None:
        due = time.monotonic() + self._options.rotate_s
        while True:
            try:
                call = self._queue.get(timeout=max(due - time.monotonic(), 0.01))
            except queue.Empty:
                self._rotate()
                due = time.monotonic() + self._options.rotate_s
                continue
            if call is None:
                self._rotate()
                return
            self._count(call)
            if time.monotonic() >= due:
                self._rotate()
                due = time.monotonic() + self._options.rotate_s

    def _count(self, call: Call) -> None:
        try:
            values = call.values if self._complete is None else self._complete(call)
            requests = requests_of(call.inputs, call.label)
            source = Source(1, call.requests, identity=requests.identity, begun=call.when, ended=call.when)
            with np.errstate(all="ignore"):
                self._merger.add(count_batch(self._like, values, requests, source=source))
        except Exception as error:  # whatever it is, production goes on
            self.failed(error, call.requests)
        finally:
            with self._lock:
                self._waiting -= call.nbytes

    def _rotate(self) -> None:
        """Write what was counted since the last file, if anything went by; keep it when that fails."""
        with self._lock:
            window, self._window = self._window, Source()
        try:
            found = self._merger.result()
            if not (window.seen or window.dropped or window.errors or found.source.requests):
                return
            source = _with_window(found.source, window)
            name = f"{_timestamp(source.begun if source.requests else time.time())}-{os.getpid()}"
            self._files += 1
            write_stats(
                dataclasses.replace(found, source=source), self._folder / f"{name}-{self._files}.stats"
            )
            self._merger = Merger(self._like)
        except Exception as error:
            with self._lock:
                self._window = _with_window(self._window, window)
            self.failed(error, 0)


def _with_window(source: Source, window: Source) -> Source:
    return dataclasses.replace(
        source,
        seen=source.seen + window.seen,
        dropped=source.dropped + window.dropped,
        errors=source.errors + window.errors,
        last_error=source.last_error or window.last_error,
    )


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%SZ")
