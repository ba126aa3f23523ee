"""Adding statistics that lie in files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diag.drift.merge import Merger
from diag.drift.stats import Stats
from diag.drift.stats_file import read_stats
from diag.errors import StatsError, UsageError

_READERS = 4
_Identity = tuple[int, float, bytes]


def merge_files(paths: Iterable[str | Path]) -> Stats:
    """The sum of one or more files, read a few at a time; memory does not grow with their number.

    Raises StatsError when one is damaged, does not belong to the others, or is given twice; UsageError when
    there is none.
    """
    names = [Path(path) for path in paths]
    if not names:
        raise UsageError("there are no statistics to merge", "Name the files.")
    merger: Merger | None = None
    seen: dict[_Identity, Path] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for path, stats in zip(names, _ahead(pool, names), strict=True):
            _refuse_twice(seen, path, stats)
            if merger is None:
                merger = Merger(stats)
            else:
                merger.add(stats, f"{str(path)!r}")
    assert merger is not None
    return merger.result()


def _ahead(pool: ThreadPoolExecutor, paths: list[Path]) -> Iterable[Stats]:
    """The files in order; a few are read ahead."""
    waiting = [pool.submit(read_stats, path) for path in paths[:_READERS]]
    for number in range(len(paths)):
        yield waiting.pop(0).result()
        if number + _READERS < len(paths):
            waiting.append(pool.submit(read_stats, paths[number + _READERS]))


def _refuse_twice(seen: dict[_Identity, Path], path: Path, stats: Stats) -> None:
    key = stats.source.identity, stats.source.begun, stats.sample_keys.tobytes()
    if stats.source.requests and key in seen:
        raise StatsError(
            f"{str(path)!r} and {str(seen[key])!r} hold the same requests",
            "Merge statistics of different data; the same twice would count double.",
        )
    seen[key] = path
