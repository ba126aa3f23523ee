"""Everything that calibration counts, over all tensors: adds up exactly, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diag.calibration.ranges import tensor_range, tensor_ranges
from diag.calibration.records import sums_of
from diag.calibration.samples import KEYS
from diag.calibration.sums import TensorSums
from diag.calibration.table import CalibrationTable

SAMPLED_BATCHES = 8
"""Batches on which the methods' effect on the outputs is measured: those with the smallest keys."""


@dataclass(slots=True)
class Measurement:
    """Sums by tensor name, and what they were taken from."""

    tensors: dict[str, TensorSums]
    batches: int = 0
    half_samples: tuple[int, int] = (0, 0)
    skipped: int = 0
    identity: int = 0
    """Sum of the keys of all samples, modulo 2^256."""
    seeds: frozenset[int] = frozenset()
    keys: tuple[int, ...] = field(default=())
    """Keys of the sampled batches, smallest first."""

    @staticmethod
    def of(tensors: Iterable[str]) -> Measurement:
        """Nothing measured yet of these tensors."""
        return Measurement({name: TensorSums() for name in tensors})

    def add(self, other: Measurement) -> None:
        """Take in other data of the same tensors."""
        for name, sums in other.tensors.items():
            self.tensors[name].add(sums)
        self.batches += other.batches
        mine, theirs = self.half_samples, other.half_samples
        self.half_samples = (mine[0] + theirs[0], mine[1] + theirs[1])
        self.skipped += other.skipped
        self.identity = (self.identity + other.identity) % KEYS
        self.seeds |= other.seeds
        self.keys = tuple(sorted({*self.keys, *other.keys})[:SAMPLED_BATCHES])

    def not_finite(self) -> Sequence[str]:
        """Tensors that held NaN or infinity."""
        return [name for name, sums in self.tensors.items() if sums.nonfinite]

    def left_out(self) -> Measurement:
        """What remains of a bad batch: that it was there, and how bad it was."""
        counted = {name: TensorSums(nonfinite=sums.nonfinite) for name, sums in self.tensors.items()}
        return Measurement(counted, skipped=1)


def table_of(found: Measurement, model_sha256: str, method: str, costed: bool = True) -> CalibrationTable:
    """The table that says all of it, with the ranges of every method but `best`.

    With `costed` false it holds min-max only: enough for `measurement_of`, and quickly made.
    """
    samples = sum(found.half_samples)
    return CalibrationTable(
        schema="trtdiag.calibration/1",
        model_sha256=model_sha256,
        data=_in_words(samples, found),
        data_sha256=f"{found.identity:064x}",
        method=method,
        batches=found.batches,
        samples=samples,
        half_samples=found.half_samples,
        skipped_batches=found.skipped,
        random_seeds=tuple(sorted(found.seeds)),
        sampled_batches=tuple(f"{key:064x}" for key in found.keys),
        tensors=tensor_ranges(found.tensors)
        if costed
        else {name: tensor_range(sums, {}) for name, sums in found.tensors.items()},
    )


def _in_words(samples: int, found: Measurement) -> str:
    words = f"{_counted(samples, 'sample')} in {_counted(found.batches, 'batch', 'batches')}"
    if found.seeds:
        words += f", RANDOM numbers (seed {', '.join(map(str, sorted(found.seeds)))})"
    return words


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def measurement_of(table: CalibrationTable) -> Measurement:
    """What a table was made from. Raises TableError when it holds no histograms, or damaged ones."""
    return Measurement(
        tensors={name: sums_of(name, found) for name, found in table.tensors.items()},
        batches=table.batches,
        half_samples=table.half_samples,
        skipped=table.skipped_batches,
        identity=int(table.data_sha256, 16),
        seeds=frozenset(table.random_seeds),
        keys=tuple(int(key, 16) for key in table.sampled_batches),
    )
