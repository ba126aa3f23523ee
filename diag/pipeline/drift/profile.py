"""Makes activation statistics as a file of their own: `trtdiag profile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from diag.calibration.table import read_table
from diag.drift.merge_files import merge_files
from diag.drift.profile import profile, scaled_by_data, scaled_by_table, watched_tensors
from diag.drift.stats import Stats, empty_stats
from diag.drift.stats_file import is_stats, read_stats, write_stats
from diag.engines.stamp import sha256_of
from diag.errors import StatsError, UsageError
from diag.feeds import Feeds, open_feeds
from diag.files import output_file
from diag.model import shapes
from diag.model.graph import LINEAR_OPS, Model
from diag.model.load import load_model
from diag.progress import Progress
from diag.typed.apply import operands_of


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Options of `trtdiag profile`, in its terms."""

    model: str
    data: str
    out: str
    calibration: str | None = None
    """A calibration table, or statistics whose tensors and scales are to be taken."""
    limit: int | None = None
    channels: bool = False
    date: str | None = None
    """When the data were seen, as ISO 8601; without a zone it is UTC."""


def profile_model(settings: ProfileSettings, progress: Progress) -> Stats:
    """Count the model's tensors on the data, and write the statistics.

    Raises DataError, EngineError, ModelError, OutputError, StatsError, TableError and UsageError.
    """
    when = time_of(settings.date)
    model = load_model(settings.model)
    feeds = open_feeds(settings.data, model.inputs, settings.limit, finite=False)
    file = output_file(settings.out, settings.model)
    found = profile(
        model, like_of(model, feeds, settings, progress), feeds, settings.channels, when, progress
    )
    write_stats(found, file)
    return found


def merge_profiles(paths: Sequence[str], out: str) -> Stats:
    """Join statistics of parts of the data and write those of all of it. Raises StatsError and UsageError."""
    if len(paths) < 2:
        raise UsageError("merging needs two files or more", "For example: --merge a.stats b.stats --out all.")
    found = merge_files(paths)
    write_stats(found, output_file(out))
    return found


def time_of(date: str | None) -> float | None:
    """A date in seconds since 1970. Raises UsageError."""
    if date is None:
        return None
    try:
        found = datetime.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"{date!r} is no date", "Give YYYY-MM-DD, or YYYY-MM-DDTHH:MM.") from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def like_of(model: Model, feeds: Feeds, settings: ProfileSettings, progress: Progress) -> Stats:
    """Nothing yet of the tensors that are to be counted."""
    path = settings.calibration
    if path is not None and is_stats(path):
        return _as_in(path, model)
    if path is not None:
        table = read_table(path, model.sha256)
        sha256 = sha256_of(Path(path))
        tensors = scaled_by_table(model, watched_tensors(model, table.tensors), table)
        return empty_stats(model.sha256, sha256, tensors)
    kinds = watched_tensors(model, _activations(model))
    progress.note("no --calibration: scales are the largest magnitudes of these data themselves")
    return empty_stats(model.sha256, None, scaled_by_data(model, kinds, feeds, progress))


def _as_in(path: str, model: Model) -> Stats:
    known = read_stats(path)
    if known.model_sha256 != model.sha256:
        raise StatsError(
            f"statistics {path!r} were made with another model ({known.model_sha256[:12]}..., "
            f"this one is {model.sha256[:12]}...)",
            "Profile the calibration data with this model first.",
        )
    return empty_stats(known.model_sha256, known.table_sha256, known.tensors)


def _activations(model: Model) -> list[str]:
    """What INT8 would quantize: the operands of every Conv, ConvTranspose, MatMul and Gemm."""
    formats = {layer.id: "int8" for layer in model.layers if layer.op_type in LINEAR_OPS}
    operands = operands_of(model, formats, shapes.infer(model))
    return [operand.tensor for operand in operands if operand.weight is None]
