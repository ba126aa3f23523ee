"""Runs a paired graph over the data, batch by batch, and keeps what it has."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from diag.compare.comparison import Comparison, Observed
from diag.engines.onnxruntime import Array
from diag.engines.slices import Observation, SlicedRun
from diag.feeds import Feeds
from diag.progress import Progress

_SAVE_SHARE = 0.02
"""Share of the time that may go into keeping what is done."""
_WORKERS = os.cpu_count() or 1


@dataclass(frozen=True)
class Checkpoint:
    """Where a run keeps what it has, and which run it is."""

    path: Path
    key: str


def run_batches(
    run: SlicedRun, feeds: Feeds, comparison: Comparison, checkpoint: Checkpoint | None, progress: Progress
) -> None:
    """Compare every batch; go on where an interrupted run of the same key stopped.

    Whole batches are kept, as often as costs little; the file is removed when all are done.
    """
    total = len(feeds)
    if checkpoint is not None and comparison.load(checkpoint.path, checkpoint.key):
        progress.note(f"resumed: {comparison.batches} of {total} batches were done before")
    done = comparison.batches
    progress.start("comparing layers", total)
    progress.advance(done)
    due = 0.0
    with ThreadPoolExecutor(_WORKERS) as pool:
        for number, batch in enumerate(feeds):
            if number < done:
                continue
            _compare_batch(pool, run, batch, number, comparison)
            comparison.batches = number + 1
            comparison.samples += batch_size(batch)
            progress.advance()
            if checkpoint is not None and number + 1 < total and time.monotonic() >= due:
                due = _keep(comparison, checkpoint)
    if checkpoint is not None:
        checkpoint.path.unlink(missing_ok=True)


def _keep(comparison: Comparison, checkpoint: Checkpoint) -> float:
    """Save; the time from which saving again costs little."""
    began = time.monotonic()
    comparison.save(checkpoint.path, checkpoint.key)
    ended = time.monotonic()
    return ended + (ended - began) / _SAVE_SHARE


def _compare_batch(
    pool: Executor, run: SlicedRun, batch: Mapping[str, Array], number: int, comparison: Comparison
) -> None:
    """While one slice runs, those of the slice before are measured (NumPy lets other threads run)."""

    def measure(share: Sequence[Observation]) -> None:
        for seen in share:
            comparison.observe(number, Observed(seen.watch.tensor, seen.reference, seen.emulated, seen.local))

    measuring: list[Future[None]] = []
    for observations in run.run(batch):
        _finish(measuring)
        measuring = [pool.submit(measure, observations[i::_WORKERS]) for i in range(_WORKERS)]
    _finish(measuring)


def _finish(measuring: Sequence[Future[None]]) -> None:
    for future in measuring:
        future.result()


def batch_size(batch: Mapping[str, object]) -> int:
    """Samples in a batch: the first dimension of its first input that has one."""
    shapes = (getattr(array, "shape", ()) for array in batch.values())
    return next((int(shape[0]) for shape in shapes if shape), 1)
