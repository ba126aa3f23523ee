"""Processes that run and count batches. The sums they return add up exactly, so their order is free."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import SpawnContext
from typing import Any

from numpy.typing import NDArray

from diag.calibration.measurement import Measurement
from diag.calibration.meter import Meter
from diag.errors import EngineError
from diag.model.load import load_model

Batch = Mapping[str, NDArray[Any]]

_WAITING = 2
"""Batches handed out for each process: one that it works on and one that waits."""


class Workers:
    """A pool of processes, each with the model loaded and its share of the cores."""

    def __init__(self, model_path: str, tensors: tuple[str, ...], jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        shares = _shares(context, jobs)
        self._jobs = jobs
        self._pool = ProcessPoolExecutor(jobs, context, _begin, (model_path, tensors, shares))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def counted(self, batches: Iterator[tuple[int, str, Batch]]) -> Iterator[tuple[int, str, Measurement]]:
        """The sums of each batch, as they get ready. Raises EngineError when a process dies."""
        running: dict[Future[Measurement], tuple[int, str]] = {}
        try:
            for number, origin, batch in batches:
                if len(running) >= _WAITING * self._jobs:
                    yield from _ready(running)
                running[self._pool.submit(_count, dict(batch))] = number, origin
            while running:
                yield from _ready(running)
        except BrokenProcessPool as error:
            raise EngineError(
                "a calibration process died; the system may have run out of memory",
                "Use fewer --jobs; what is done is kept, the same command goes on.",
            ) from error


def _ready(running: dict[Future[Measurement], tuple[int, str]]) -> Iterator[tuple[int, str, Measurement]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        number, origin = running.pop(future)
        yield number, origin, future.result()


def _shares(context: SpawnContext, jobs: int) -> Any:
    """A queue with the cores of each process."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    queue = context.SimpleQueue()
    for job in range(jobs):
        queue.put(cores[job::jobs] if len(cores) >= jobs else cores)
    return queue


_meter: Meter | Exception = EngineError("the process has not begun")


def _begin(model_path: str, tensors: tuple[str, ...], shares: Any) -> None:
    """In the process: take a share of the cores, load the model, end when the parent does."""
    global _meter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cores = shares.get()
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        _meter = Meter(load_model(model_path), tensors)
    except Exception as error:  # to be raised where the parent hears it
        _meter = error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _count(batch: Batch) -> Measurement:
    if isinstance(_meter, Exception):
        raise _meter
    return _meter.count(_meter.run(batch))
