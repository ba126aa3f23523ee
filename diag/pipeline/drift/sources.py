"""The two sides of a drift report, read from a calibration table or statistics, and from production's."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from diag.calibration.table import CalibrationTable, read_table
from diag.drift.merge import merge
from diag.drift.merge_files import merge_files
from diag.drift.side import Side, sides_of_stats, sides_of_table
from diag.drift.spread import LAST_CODE
from diag.drift.stats import Stats, Tensor
from diag.drift.stats_file import read_stats
from diag.engines.stamp import sha256_of
from diag.errors import NotEnoughEvidenceError, StatsError

_DATE = re.compile(r"(?<!\d)(\d{4})-?(\d{2})-?(\d{2})(?!\d)")


@dataclass(frozen=True)
class Group:
    """Some of the production files: a slice, a date, or both."""

    slice: str
    date: str
    stats: Stats


@dataclass(frozen=True)
class Calibration:
    """What was calibrated on: a table, or statistics of the calibration data."""

    path: str
    table: CalibrationTable | None
    stats: Stats | None

    @property
    def requests(self) -> int:
        if self.stats is not None:
            return self.stats.source.requests
        assert self.table is not None
        return self.table.samples

    @property
    def words(self) -> str:
        return f"{self.path} ({self.table.method}, {self.table.data})" if self.table else self.path


@dataclass(frozen=True)
class Sources:
    """Both sides. Sides of production are made with `sides`, for all of it or for a group."""

    calibration: Calibration
    sides: Mapping[str, Side]
    steps: Mapping[str, float]
    production: Stats
    groups: tuple[Group, ...]
    words: str

    def production_sides(self, stats: Stats) -> dict[str, Side]:
        """Statistics of production in the calibrated steps."""
        found = sides_of_stats(stats, self.steps)
        return {name: side for name, side in found.items() if name in self.steps}


def open_sources(calibration: str, production: Sequence[str], least_requests: int) -> Sources:
    """Read both sides.

    `production`: files of statistics, or folders of them; a folder's subfolders are slices.

    Raises StatsError when one cannot be read or belongs to another model or table, TableError for a bad
    table, NotEnoughEvidenceError when either side holds too few requests.
    """
    groups = tuple(_groups(production))
    merged = groups[0].stats if len(groups) == 1 else merge(group.stats for group in groups)
    found = _calibration(calibration)
    _refuse_other(found, merged, production[0])
    _refuse_few(merged.source.requests, "production", least_requests)
    if found.stats is not None:
        _refuse_few(found.stats.source.requests, "the calibration side", least_requests)
    steps = _steps(found, merged)
    if found.table is not None:
        sides = sides_of_table(found.table, steps)
    else:
        assert found.stats is not None
        sides = sides_of_stats(found.stats, steps)
    return Sources(found, sides, steps, merged, groups, ", ".join(production))


def _calibration(path: str) -> Calibration:
    try:
        with Path(path).open("rb") as stream:
            is_archive = stream.read(2) == b"PK"
    except IsADirectoryError:
        files = _files(Path(path))
        if not files:
            raise _nothing_in(path) from None
        return Calibration(path, None, merge_files(files))
    except OSError as error:
        raise StatsError(
            f"{path!r} cannot be read: {error.strerror or error}", "Give a calibration table or statistics."
        ) from error
    if is_archive:
        return Calibration(path, None, read_stats(path))
    return Calibration(path, read_table(path), None)


def _groups(paths: Sequence[str]) -> Iterator[Group]:
    """The files by slice and date. Files that have neither are one group each, named by the file."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in map(Path, paths):
        slices = sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
        for folder in (path, *slices):
            files = _files(folder) if folder.is_dir() else [folder]
            for file in files:
                name = unquote(folder.name) if folder is not path else ""
                found.setdefault((name, _date_in_name(file)), []).append(file)
    if not found:
        raise _nothing_in(paths[0])
    for (name, date), files in sorted(found.items()):
        if name or date or len(files) == 1:
            yield Group(name, date, merge_files(files))
        else:
            yield from _by_stamp(files)


def _by_stamp(files: Sequence[Path]) -> Iterator[Group]:
    """Files without slice and date in their names: by the day they were begun, else each for itself."""
    days: dict[str, list[Path]] = {}
    for file in files:
        begun = read_stats(file).source.begun
        days.setdefault(_day(begun) if math.isfinite(begun) else "", []).append(file)
    for day, some in sorted(days.items()):
        if day:
            yield Group("", day, merge_files(some))
        else:
            merge_files(some)  # refuses a file that is given twice, or does not belong to the others
            yield from (Group(file.stem, "", read_stats(file)) for file in some)


def _nothing_in(folder: str) -> StatsError:
    return StatsError(f"{folder!r} holds no statistics", "Make them with trtdiag profile.")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def _date_in_name(file: Path) -> str:
    for match in _DATE.finditer(file.stem):
        try:
            return datetime.date(*map(int, match.groups())).isoformat()
        except ValueError:
            continue
    return ""


def _day(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date().isoformat()


def _refuse_few(found: int, side: str, needed: int) -> None:
    if found < needed:
        held = "no request" if found == 0 else "one request" if found == 1 else f"{found} requests"
        raise NotEnoughEvidenceError(
            f"{side} holds {held}, which says nothing about drift", f"At least {needed} are needed."
        )


def _refuse_other(calibration: Calibration, production: Stats, name: str) -> None:
    """Raise StatsError unless both sides are of one model, and of one table where both name one."""
    first = calibration.table or calibration.stats
    assert first is not None
    if first.model_sha256 != production.model_sha256:
        raise StatsError(
            f"{name!r} was made with another model ({production.model_sha256[:12]}...) than "
            f"{calibration.path!r} ({first.model_sha256[:12]}...)",
            "Profile the model that was calibrated.",
        )
    if calibration.table is not None:
        mine: str | None = sha256_of(Path(calibration.path))
    else:
        assert calibration.stats is not None
        mine = calibration.stats.table_sha256
    theirs = production.table_sha256
    if None not in (mine, theirs) and mine != theirs:
        raise StatsError(
            f"{name!r} was made with another calibration table ({theirs and theirs[:12]}...) than "
            f"{calibration.path!r} ({mine and mine[:12]}...)",
            "Profile with the table that is deployed.",
        )


def _steps(calibration: Calibration, production: Stats) -> dict[str, float]:
    """The calibrated INT8 step of each tensor that can be compared.

    Production's statistics know it where they were made with the table; else the table's own method says it.
    Inputs have no calibrated range: their values' largest magnitude on the calibration data stands in.
    """
    steps = {}
    own = calibration.table.scales("int8") if calibration.table else {}
    for tensor in production.tensors:
        step = _step(tensor, calibration, own)
        if step:
            steps[tensor.name] = step
    return steps


def _step(tensor: Tensor, calibration: Calibration, own: Mapping[str, float]) -> float | None:
    if tensor.scale_from == "table":
        return tensor.step
    if calibration.stats is None:
        return own.get(tensor.name)
    place = calibration.stats.index.get(tensor.name)
    if place is None or (tensor.scale_from == "unit" and tensor.step == 1.0):  # integers: ids, masks
        return None
    if tensor.scale_from == "unit" and tensor.kind == "output":  # outputs are not quantized
        return None
    before = calibration.stats.tensors[place]
    return before.step if before.scale_from != "unit" else calibration.stats[tensor.name].absmax / LAST_CODE
