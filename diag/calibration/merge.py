"""Tables of parts of the data, joined into the table that one run over all of it would have given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diag.calibration.measurement import Measurement, measurement_of, table_of
from diag.calibration.table import BEST, IMPORTED, SEARCHED, CalibrationTable, read_table
from diag.errors import TableError, UsageError


def merge_tables(paths: Sequence[str | Path], method: str | None) -> CalibrationTable:
    """The joint table of two or more tables of one model, with ranges of `method` (None: what they all have).

    Raises UsageError for fewer than two; TableError when one is of another model or of other tensors, holds
    no histograms, is given twice, or when the methods differ and none was chosen.
    """
    if len(paths) < 2:
        raise UsageError(
            "merging needs two tables or more", "For example: --merge a.json b.json --out c.json."
        )
    tables = [read_table(path) for path in paths]
    for path, table in zip(paths[1:], tables[1:], strict=True):
        _refuse_other(paths[0], tables[0], path, table)
    _refuse_twice(paths, tables)
    chosen = _method(tables, method)
    found = Measurement.of(tables[0].tensors)
    for table in tables:
        found.add(measurement_of(table))
    return table_of(found, tables[0].model_sha256, chosen)


def _refuse_other(
    first_path: str | Path, first: CalibrationTable, path: str | Path, table: CalibrationTable
) -> None:
    if table.model_sha256 != first.model_sha256:
        raise TableError(
            f"{str(path)!r} was made for another model ({table.model_sha256[:12]}...) than "
            f"{str(first_path)!r} ({first.model_sha256[:12]}...)",
            "Merge tables of one model only.",
        )
    other = sorted(table.tensors.keys() ^ first.tensors.keys())
    if other:
        raise TableError(
            f"{str(path)!r} and {str(first_path)!r} hold different tensors, first {other[0]!r}",
            "Calibrate both with the same plan.",
        )


def _refuse_twice(paths: Sequence[str | Path], tables: Sequence[CalibrationTable]) -> None:
    seen: dict[str, str | Path] = {}
    for path, table in zip(paths, tables, strict=True):
        if table.data_sha256 in seen:
            raise TableError(
                f"{str(path)!r} and {str(seen[table.data_sha256])!r} were made from the same data",
                "Merge tables of different data; the same twice would count double.",
            )
        seen[table.data_sha256] = path


def _method(tables: Sequence[CalibrationTable], method: str | None) -> str:
    found = {table.method for table in tables}
    chosen = method or (found.pop() if len(found) == 1 else None)
    if chosen is None:
        raise TableError(
            f"the tables use different methods ({', '.join(sorted(found))})", "Choose one with --method."
        )
    if chosen in (BEST, SEARCHED, IMPORTED):
        raise TableError(
            f"{chosen} ranges are not merged: they were chosen on data, and tables keep histograms only",
            "Merge by another --method, or calibrate once on all data.",
        )
    return chosen
