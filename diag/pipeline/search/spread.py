"""Trials measured by processes (`--jobs`) or a Ray cluster (`--ray`), the same numbers bit for bit.

Every worker sets the search up anew from the same settings and gives its trials back; only this process
writes them down. What is searched never depends on who measured it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from diag.errors import EngineError, UsageError
from diag.pipeline.search.outcome import Outcome
from diag.pipeline.search.settings import SearchSettings
from diag.pipeline.search.setup import Search, set_up
from diag.pipeline.search.variants import Task
from diag.progress import Silent
from diag.search.rank import Candidate

_CHUNKS_PER_WORKER = 4


@dataclass(frozen=True)
class _Given:
    """What a worker sets its search up from."""

    settings: SearchSettings
    candidates: tuple[Candidate, ...]
    """The caller's: scores may round otherwise elsewhere, and a screen would keep others."""


@contextmanager
def spread_over(settings: SearchSettings, search: Search) -> Iterator[None]:
    """Inside, workers measure what the search asks for ahead; without --jobs and --ray there are none.

    Raises UsageError where Ray is not installed, EngineError when a worker dies.
    """
    if settings.ray is None and settings.jobs <= 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="trtdiag-workers-") as folder:
        ours = replace(
            settings, out=folder, calibration=search.table or settings.calibration, jobs=1, ray=None
        )
        given = _Given(ours, tuple(search.candidates))
        with _ray(given, settings.ray) if settings.ray is not None else _pool(given, settings.jobs) as run:
            search.variants.workers = lambda tasks: _measure(run, tasks, max(settings.jobs, 1))
            try:
                yield
            finally:
                search.variants.workers = None


Run = Callable[[Sequence[Sequence[Task]]], Iterable[list[Outcome]]]


def _measure(run: Run, tasks: Sequence[Task], workers: int) -> Iterator[Outcome]:
    size = max(1, -(-len(tasks) // (workers * _CHUNKS_PER_WORKER)))
    chunks = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    return chain.from_iterable(run(chunks))


@contextmanager
def _pool(given: _Given, jobs: int) -> Iterator[Run]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (context.Value("i", 0), jobs))
    try:
        yield lambda chunks: pool.map(_work, [given] * len(chunks), chunks)
    except BrokenProcessPool as error:
        raise EngineError(
            "a worker died; the system may have run out of memory",
            "Use fewer --jobs; what is done is kept, the same command goes on.",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(counter: Any, jobs: int) -> None:
    """Take a share of the cores, so that processes do not fight for them."""
    if not hasattr(os, "sched_setaffinity"):
        return
    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number % jobs :: jobs] or cores)


@contextmanager
def _ray(given: _Given, address: str | None) -> Iterator[Run]:
    try:
        import ray  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise UsageError(
            "--ray needs Ray, which is not installed", "Run: pip install 'trtdiag[ray]'."
        ) from error
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="error")
    except Exception as error:
        raise UsageError(
            f"Ray cannot be reached at {address!r}: {error}", "Give host:port or local."
        ) from error
    try:
        remote: Any = ray.remote(_work)
        yield lambda chunks: ray.get([remote.remote(given, chunk) for chunk in chunks])
    finally:
        ray.shutdown()


def _work(given: _Given, tasks: Sequence[Task]) -> list[Outcome]:
    """Measure in a worker."""
    search = _set_up(given)
    return [search.variants.outcome(low, batch) for low, batch in tasks]


@lru_cache(maxsize=1)
def _set_up(given: _Given) -> Search:
    """One search for each worker process; it keeps no trials where others would find them."""
    settings = given.settings
    shared = settings.out if Path(settings.out).is_dir() else None
    out = tempfile.mkdtemp(prefix="trtdiag-worker-", dir=shared)
    return set_up(replace(settings, out=out), Silent(), given.candidates)
