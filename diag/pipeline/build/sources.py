"""The file that a builder reads: the typed model, or the model itself with flags and pins beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diag.calibration.cache_table import read_cache
from diag.calibration.table import CalibrationTable, write_table
from diag.engines.stamp import Identity, sha256_of
from diag.engines.weak import FLAGS, WeakTyping
from diag.errors import TableError, UsageError
from diag.feeds import Feeds
from diag.files import output_file
from diag.model.graph import Model
from diag.model.save import save_model
from diag.pipeline.build.settings import BuildSettings
from diag.pipeline.engine.profiles import Profile
from diag.pipeline.prepare import Planned, calibrate, read_scales
from diag.pipeline.structure import structure_notes
from diag.plan.schema import plan_sha256
from diag.progress import Progress

TABLE_SUFFIX = ".calibration.json"
CACHE_SUFFIX = ".calibration.cache"


@dataclass(frozen=True)
class Job:
    """What is known before the builder starts."""

    settings: BuildSettings
    out: Path
    model: Model
    planned: Planned | None
    feeds: Feeds | None
    profiles: Mapping[str, Profile]


@dataclass(frozen=True)
class Source:
    """What the builder reads, and what it is made from."""

    identity: Identity
    formats: Mapping[str, str] = field(default_factory=dict)
    """Format of each layer, as the rewrite could apply it; empty without a plan."""
    weak: WeakTyping | None = None
    notes: tuple[str, ...] = ()
    table: Path | None = None
    """Table or cache with the scales."""


def write_source(job: Job, path: Path, scratch: Path, progress: Progress) -> Source:
    """Write the ONNX file for the builder to `path`; see `Source` for what comes with it."""
    if job.planned is None:
        save_model(job.model.proto, job.model.weights, path)
        return Source(Identity(job.model.sha256))
    if job.settings.weak:
        save_model(job.model.proto, job.model.weights, path)
        return _weak_source(job, job.planned, scratch)
    return _typed_source(job, job.planned, path, progress)


def _typed_source(job: Job, planned: Planned, path: Path, progress: Progress) -> Source:
    table, table_path = _scales(job, planned, progress)
    typed = planned.apply(table)
    save_model(typed.for_engines, typed.weights, path)
    table_sha256 = sha256_of(table_path) if table_path else ""
    identity = Identity(job.model.sha256, plan_sha256(planned.plan), table_sha256)
    notes = (*typed.notes, *structure_notes(planned, typed))
    return Source(identity, typed.formats, notes=notes, table=table_path)


def _scales(job: Job, planned: Planned, progress: Progress) -> tuple[CalibrationTable | None, Path | None]:
    """The table and its file; one that is measured here is kept beside the engine."""
    given = job.settings.calibration
    if given is not None:
        return read_scales(planned, given), Path(given)
    if not planned.activations:
        return None, None
    if job.feeds is None:
        raise TableError(
            "the plan quantizes activations and needs their scales",
            "Give --calibration TABLE or --data DATA.",
        )
    table, _ = calibrate(planned, job.feeds, None, progress)
    assert table is not None
    path = job.out.with_name(job.out.name + TABLE_SUFFIX)
    write_table(table, path)
    return table, path


def _weak_source(job: Job, planned: Planned, scratch: Path) -> Source:
    plan = planned.plan
    pins = {layer: pin.format for pin in planned.resolved.pins for layer in pin.layers}
    formats = tuple(sorted({plan.default, plan.base, *pins.values()} & FLAGS.keys()))
    weak, scales = WeakTyping(formats, pins), ""
    notes: tuple[str, ...] = ()
    if "int8" in formats:
        weak, scales, notes = _calibrated(job, planned, weak, scratch / "batches")
    identity = Identity(job.model.sha256, plan_sha256(plan), scales)
    table = Path(weak.cache) if weak.cache else None
    return Source(identity, planned.resolved.formats, weak, notes, table)


def _calibrated(
    job: Job, planned: Planned, weak: WeakTyping, spool: Path
) -> tuple[WeakTyping, str, tuple[str, ...]]:
    """Where the builder's calibrator gets its scales, the hash of what they come from, and notes."""
    if any(layer.op_type == "QuantizeLinear" for layer in job.model.layers):
        raise UsageError(
            "the model carries its own quantizers, beside which TensorRT ignores a calibrator",
            "Build it without --weak.",
        )
    given = job.settings.cache
    if given is not None and Path(given).is_file():
        cache = Path(given).resolve()
        read_cache(cache, job.model, planned.activations)
        return replace(weak, cache=str(cache)), sha256_of(cache), ()
    if job.feeds is None:
        raise TableError("INT8 needs scales", "Give --cache FILE of an earlier calibration, or --data DATA.")
    # A cache that an earlier build left there by itself must not be taken for this one's.
    cache = output_file(given or f"{job.out}{CACHE_SUFFIX}").resolve()
    cache.unlink(missing_ok=True)
    notes = _spool(job.feeds, job.profiles, spool)
    return replace(weak, cache=str(cache), batches=str(spool)), job.feeds.sha256, notes


def _spool(feeds: Feeds, profiles: Mapping[str, Profile], folder: Path) -> tuple[str, ...]:
    """Write the batches of the usual shape for the child: TensorRT calibrates with one shape only."""
    folder.mkdir()
    left_out = 0
    number = -1
    for number, batch in enumerate(feeds):
        if all(tuple(batch[name].shape) == usual for name, (_, usual, _) in profiles.items()):
            arrays: dict[str, Any] = dict(batch)
            np.savez(folder / f"{number:06d}.npz", **arrays)
        else:
            left_out += 1
    if left_out == number + 1:
        raise UsageError(
            "no batch has the usual shape of the profile, which TensorRT calibrates with",
            "Let --shapes name a shape that the data have as the middle one.",
        )
    return (f"{left_out} batches of another shape were left out of the calibration",) if left_out else ()
