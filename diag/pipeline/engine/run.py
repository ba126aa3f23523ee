"""Runs an engine beside reference and emulation over the same batches; keeps the errors of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from diag.compare.record import Record
from diag.compare.split import Gaps
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, Runner, refuse_output
from diag.numerics.error import measure
from diag.numerics.measured import Measured, TensorKind, measure_tensor
from diag.numerics.metrics import error_metrics
from diag.progress import Progress


@dataclass
class OutputErrors:
    """Errors of the float outputs over all batches, by output."""

    format: dict[str, Record] = field(default_factory=dict)
    """Emulation against reference."""
    engine: dict[str, Record] = field(default_factory=dict)
    """Engine against reference."""
    engine_vs_emulation: dict[str, Record] = field(default_factory=dict)
    batches: int = 0

    def gaps(self, name: str, **known: object) -> Gaps:
        """What `diag.compare.split` needs to know of an output; `known` are its other fields."""
        gaps = [rel_l2_of(records[name]) for records in (self.format, self.engine_vs_emulation, self.engine)]
        return Gaps(*gaps, **known)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Three:
    """The three numerics of one plan."""

    reference: Runner
    emulation: Runner
    engine: Runner

    def close(self) -> None:
        for runner in (self.reference, self.emulation, self.engine):
            runner.close()


@runtime_checkable
class Measuring(Protocol):
    """A runner that measures its outputs itself, where they are."""

    def measured(
        self, feed: Feed, references: Sequence[Mapping[str, Array]], kinds: Mapping[str, TensorKind]
    ) -> list[dict[str, Measured]]: ...


def run_three(
    three: Three, feeds: Iterable[Feed], kinds: Mapping[str, TensorKind], progress: Progress
) -> OutputErrors:
    """Run every batch through all three. Raises EngineError where one fails or an output is missing."""
    errors = OutputErrors()
    for number, feed in enumerate(feeds):
        reference = {n: a for n, a in three.reference.run(feed).items() if a.dtype.kind == "f"}
        emulated = three.emulation.run(feed)
        emulated = {name: emulated[name] for name in reference}
        against = measured_outputs(three.engine, feed, (reference, emulated), kinds)
        for name, expected in reference.items():
            _record(errors.format, name, kinds).update(number, expected, emulated[name])
        for records, found in zip((errors.engine, errors.engine_vs_emulation), against, strict=True):
            for name, measured in found.items():
                _record(records, name, kinds).take(number, measured, reference[name].shape)
        errors.batches = number + 1
        progress.advance()
    return errors


def measured_outputs(
    engine: Runner, feed: Feed, references: Sequence[Mapping[str, Array]], kinds: Mapping[str, TensorKind]
) -> list[dict[str, Measured]]:
    """Run one batch; errors of the outputs against each set of references. Raises EngineError."""
    if isinstance(engine, Measuring):
        return engine.measured(feed, references, kinds)
    built = engine.run(feed)
    shapes = {name: array.shape for name, array in built.items()}
    found: list[dict[str, Measured]] = []
    for wanted in references:
        found.append({})
        for name, expected in wanted.items():
            refuse_output(name, shapes, expected)
            ref, cand = (np.asarray(a, np.float32, order="C") for a in (expected, built[name]))
            found[-1][name] = measure_tensor(ref, cand, kinds.get(name, TensorKind()))
    return found


def _record(records: dict[str, Record], name: str, kinds: Mapping[str, TensorKind]) -> Record:
    if name not in records:
        records[name] = Record.of(kinds.get(name, TensorKind()))
    return records[name]


def rel_l2_of(record: Record) -> float:
    """Relative L2 error; infinite where values are not finite."""
    return error_metrics(record.sums)["rel_l2"]


def output_gaps(reference: Mapping[str, Array], other: Mapping[str, Array]) -> dict[str, float]:
    """Relative L2 of each float output that both have, from one batch."""
    return {
        name: error_metrics(measure(_flat(expected), _flat(other[name]), None))["rel_l2"]
        for name, expected in reference.items()
        if name in other and expected.dtype.kind == "f" and expected.shape == other[name].shape
    }


def _flat(array: Array) -> Array:
    return np.asarray(array, np.float32).reshape(-1)
