"""Runs an engine beside reference and emulation over the same batches; keeps the errors of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from diag.compare.comparison import TensorKind
from diag.compare.record import Record
from diag.compare.split import Gaps
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, Runner
from diag.errors import EngineError
from diag.numerics.error import measure
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


def run_three(
    three: Three, feeds: Iterable[Feed], kinds: Mapping[str, TensorKind], progress: Progress
) -> OutputErrors:
    """Run every batch through all three. Raises EngineError where one fails or an output is missing."""
    errors = OutputErrors()
    for number, feed in enumerate(feeds):
        reference, emulated = three.reference.run(feed), three.emulation.run(feed)
        built = three.engine.run(feed)
        for name, expected in reference.items():
            if expected.dtype.kind != "f":
                continue
            if name not in built:
                raise EngineError(f"the engine has no output {name!r}", "Was it built from another model?")
            for records, ref, cand in (
                (errors.format, expected, emulated[name]),
                (errors.engine, expected, built[name]),
                (errors.engine_vs_emulation, emulated[name], built[name]),
            ):
                _refuse_shape(name, ref, cand)
                _record(records, name, kinds).update(number, ref, cand)
        errors.batches = number + 1
        progress.advance()
    return errors


def _record(records: dict[str, Record], name: str, kinds: Mapping[str, TensorKind]) -> Record:
    if name not in records:
        records[name] = kinds.get(name, TensorKind()).record()
    return records[name]


def _refuse_shape(name: str, reference: Array, candidate: Array) -> None:
    if reference.shape != candidate.shape:
        raise EngineError(
            f"output {name!r} has shape {candidate.shape} in the engine, {reference.shape} in the reference",
            "Was it built from another model?",
        )


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
