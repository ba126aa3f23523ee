"""One pass over the data: batch after batch is run and counted, on one process or on several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from diag.calibration.measurement import Measurement
from diag.calibration.meter import Meter
from diag.calibration.samples import CalibrationFeeds
from diag.calibration.state import Checkpoint
from diag.calibration.workers import Workers
from diag.engines.watch import overlapped
from diag.errors import TableError, UsageError
from diag.model.graph import Model
from diag.progress import Progress

Batch = Mapping[str, NDArray[Any]]
Batches = Iterator[tuple[int, str, Batch]]
Counted = tuple[int, str, Measurement]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a pass over the data is made."""

    skip_bad: bool = False
    """Leave out batches with NaN or infinity, in an input or in a tensor that is measured."""
    jobs: int = 1
    """Processes that run the model."""
    checkpoint: Checkpoint | None = None
    more_follows: bool = False
    """Whether the checkpoint is to hold the end of the pass too, because long work follows."""

    def __post_init__(self) -> None:
        """Raises UsageError when no process would run the model."""
        if self.jobs < 1:
            raise UsageError(f"{self.jobs} processes can do nothing", "Give --jobs 1 or more.")


def measure(
    model: Model,
    tensors: tuple[str, ...],
    feeds: CalibrationFeeds,
    options: RunOptions,
    progress: Progress,
) -> Measurement:
    """Count every tensor over all batches. Memory does not grow with their number.

    Raises TableError naming the batch and the tensor when one is not finite and is not to be skipped, and
    when no batch is left; DataError and EngineError as the data and the engine do.
    """
    found, done = _begun(tensors, options, progress)
    progress.start("calibrating", len(feeds))
    progress.advance(len(done))

    def skip(number: int, origin: str) -> None:
        if number not in done:
            done.add(number)
            found.skipped += 1
            progress.note(f"{origin} is left out: an input is not finite")
            progress.advance()

    batches = (b for b in feeds.read(skip if options.skip_bad else None) if b[0] not in done)
    for number, origin, counted in _counted(model, tensors, batches, options.jobs):
        found.add(_usable(counted, origin, options.skip_bad, progress))
        done.add(number)
        progress.advance()
        if options.checkpoint is not None and (options.more_follows or len(done) < len(feeds)):
            options.checkpoint.save(found, done, at_once=len(done) == len(feeds))
    if not found.batches:
        raise TableError("every batch of the data was left out", "Check the FP32 model and the data.")
    found.seeds = frozenset() if feeds.seed is None else frozenset({feeds.seed})
    return found


def _begun(tensors: tuple[str, ...], options: RunOptions, progress: Progress) -> tuple[Measurement, set[int]]:
    kept = options.checkpoint.load() if options.checkpoint is not None else None
    if kept is None:
        return Measurement.of(tensors), set()
    progress.note(f"resumed: {len(kept[1])} batches were done before")
    return kept


def _usable(counted: Measurement, origin: str, skip_bad: bool, progress: Progress) -> Measurement:
    bad = counted.not_finite()
    if not bad:
        return counted
    if not skip_bad:
        raise TableError(
            f"tensor {bad[0]!r} is not finite in {origin} of the calibration data",
            "Check the FP32 model on that batch, or leave such batches out with --skip-bad.",
        )
    progress.note(f"{origin} is left out: {bad[0]!r} is not finite")
    return counted.left_out()


def _counted(model: Model, tensors: tuple[str, ...], batches: Batches, jobs: int) -> Iterator[Counted]:
    if jobs > 1:
        with Workers(model.path, tensors, jobs) as workers:
            yield from workers.counted(batches)
    else:
        yield from _in_this_process(Meter(model, tensors), batches)


def _in_this_process(meter: Meter, batches: Batches) -> Iterator[Counted]:
    return overlapped(
        batches,
        run=lambda batch: (batch[0], batch[1], meter.run(batch[2])),
        count=lambda seen: (seen[0], seen[1], meter.count(seen[2])),
    )
