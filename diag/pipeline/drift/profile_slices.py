"""Statistics by slice: a column of labels beside the data, or one folder of data for each slice."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from diag.drift.profile import profile, profile_slices
from diag.drift.stats import Stats
from diag.drift.stats_file import write_stats
from diag.errors import DataError, UsageError
from diag.feeds import open_feeds
from diag.files import output_folder
from diag.model.graph import Model
from diag.model.load import load_model
from diag.pipeline.drift.profile import ProfileSettings, like_of, time_of
from diag.progress import Progress

FOLDERS = "folders"
"""`--slice folders`: every subfolder of the data is a slice."""

FILE = "slice.stats"


def profile_model_slices(settings: ProfileSettings, slices: str, progress: Progress) -> dict[str, Stats]:
    """Count the model's tensors for each slice, and write OUT/SLICE/slice.stats.

    `slices`: FILE.csv:COLUMN, one row a request in the order of the data, or `folders`.

    Raises what `profile_model` raises, and DataError when labels and requests do not match.
    """
    if settings.calibration is None:
        raise UsageError("slices need one scale to be compared by", "Give --calibration TABLE.")
    model = load_model(settings.model)
    if slices == FOLDERS:
        found = _by_folder(model, settings, progress)
    else:
        found = _by_label(model, settings, _labels(slices), progress)
    out = output_folder(settings.out)
    for name, stats in found.items():
        write_stats(stats, output_folder(out / folder_of(name)) / FILE)
    return found


def folder_of(name: str) -> str:
    """A slice's name (not empty) as the name of a folder, whatever characters it holds."""
    quoted = quote(name, safe=" ()+,-_@")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def _by_folder(model: Model, settings: ProfileSettings, progress: Progress) -> dict[str, Stats]:
    root = Path(settings.data)
    folders = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    if not folders:
        raise DataError(f"{settings.data!r} holds no folders of slices", "Put each slice into a folder.")
    found = {}
    for folder in folders:
        feeds = open_feeds(str(folder), model.inputs, settings.limit, finite=False)
        like = like_of(model, feeds, settings, progress)
        when = time_of(settings.date)
        found[folder.name] = profile(model, like, feeds, settings.channels, when, progress)
    return found


def _by_label(
    model: Model, settings: ProfileSettings, labels: list[str], progress: Progress
) -> dict[str, Stats]:
    feeds = open_feeds(settings.data, model.inputs, settings.limit, finite=False)
    like = like_of(model, feeds, settings, progress)
    names = iter(labels)
    found = profile_slices(model, like, feeds, settings.channels, time_of(settings.date), progress, names)
    left = sum(1 for _ in names)
    if left and settings.limit is None:
        raise DataError(
            f"there are {len(labels)} labels for {len(labels) - left} requests", "Give one label a request."
        )
    return found


def _labels(slices: str) -> list[str]:
    path, colon, column = slices.rpartition(":")
    if not colon or not path:
        raise UsageError(f"--slice {slices!r} is not understood", f"Give FILE.csv:COLUMN, or {FOLDERS}.")
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            return list(_column(csv.DictReader(stream), path, column))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"labels {path!r} cannot be read: {error}", "Give a CSV file in UTF-8.") from error


def _column(rows: csv.DictReader[str], path: str, column: str) -> Iterator[str]:
    names = list(rows.fieldnames or ())
    if column not in names:
        raise DataError(f"{path!r} has no column {column!r}", f"Its columns: {', '.join(names) or 'none'}.")
    for row in rows:
        yield row[column] or "(none)"
