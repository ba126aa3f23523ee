"""Runs a paired graph over the data, batch by batch, and keeps what it has."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from diag.compare.comparison import Comparison, Observed
from diag.engines.slices import Observation, SlicedRun
from diag.feeds import Feeds
from diag.progress import Progress

_SAVE_EVERY_S = 10.0


@dataclass(frozen=True)
class Checkpoint:
    """Where a run keeps what it has, and which run it is."""

    path: Path
    key: str


def run_batches(
    run: SlicedRun, feeds: Feeds, comparison: Comparison, checkpoint: Checkpoint | None, progress: Progress
) -> None:
    """Compare every batch; go on where an interrupted run of the same key stopped.

    Whole batches are kept, every ten seconds; the file is removed when all are done.
    """
    if checkpoint is not None and comparison.load(checkpoint.path, checkpoint.key):
        progress.note(f"resumed: {comparison.batches} of {len(feeds)} batches were done before")
    done = comparison.batches
    progress.start("comparing layers", len(feeds))
    progress.advance(done)
    saved = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for number, batch in enumerate(feeds):
            if number < done:
                continue
            for observations in run.run(batch):
                _observe(pool, comparison, number, observations)
            comparison.batches = number + 1
            comparison.samples += batch_size(batch)
            progress.advance()
            if checkpoint is not None and time.monotonic() - saved > _SAVE_EVERY_S:
                comparison.save(checkpoint.path, checkpoint.key)
                saved = time.monotonic()
    if checkpoint is not None:
        checkpoint.path.unlink(missing_ok=True)


def _observe(
    pool: ThreadPoolExecutor, comparison: Comparison, batch: int, observations: Sequence[Observation]
) -> None:
    """Measure one slice's tensors on all cores; NumPy releases the interpreter while it works."""
    workers = os.cpu_count() or 1

    def work(share: Sequence[Observation]) -> None:
        for seen in share:
            comparison.observe(batch, Observed(seen.watch.tensor, seen.reference, seen.emulated, seen.local))

    list(pool.map(work, [observations[i::workers] for i in range(workers)]))


def batch_size(batch: Mapping[str, object]) -> int:
    """Samples in a batch: the first dimension of its first input that has one."""
    shapes = (getattr(array, "shape", ()) for array in batch.values())
    return next((int(shape[0]) for shape in shapes if shape), 1)
