"""Statistics of synthetic requests, and the table that they belong to, as files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from drift_tools import MODEL, table

from diag.calibration.table import CalibrationTable, write_table
from diag.drift.accumulate import count_batch, requests_of
from diag.drift.merge import Merger
from diag.drift.stats import Source, Stats, Tensor, empty_stats
from diag.drift.stats_file import write_stats

NAMES = ("first", "second", "third")


def draw(
    rng: np.random.Generator, requests: int, factor: float = 1.0, size: int = 512
) -> dict[str, np.ndarray]:
    """Activations of some requests, each of a size of its own: (requests, size) by tensor."""
    loud = rng.lognormal(0, 0.1, (requests, 1))
    return {name: (factor * loud * rng.normal(0, 1, (requests, size))).astype(np.float32) for name in NAMES}


def calibrated(path: Path, values: Mapping[str, np.ndarray], method: str = "minmax") -> CalibrationTable:
    """A table of these requests, the even ones in its first half, written to `path`."""
    made = table({name: [rows[::2].ravel(), rows[1::2].ravel()] for name, rows in values.items()}, method)
    write_table(made, path)
    return made


def counted(
    table_path: Path | None,
    made: CalibrationTable,
    values: Mapping[str, np.ndarray],
    label: str = "data",
    model: str = MODEL,
    kinds: Mapping[str, str] | None = None,
    begun: float | None = None,
) -> Stats:
    """Statistics of these requests in the table's steps."""
    sha = hashlib.sha256(table_path.read_bytes()).hexdigest() if table_path else None
    tensors = tuple(
        Tensor(name, (kinds or {}).get(name, "activation"), made.tensors[name].range_of(made.method), "table")
        for name in values
    )
    like = empty_stats(model, sha, tensors)
    number = len(next(iter(values.values())))
    keys = np.arange(number, dtype=np.int64)[:, None] + int(
        hashlib.sha256(label.encode()).hexdigest()[:6], 16
    )
    merger = Merger(like)
    for start in range(0, number, 256):
        rows = {name: array[start : start + 256] for name, array in values.items()}
        requests = requests_of({"ids": keys[start : start + 256]}, f"{label}{start}")
        source = None
        if begun is not None:
            source = Source(1, len(requests.labels), identity=requests.identity, begun=begun, ended=begun)
        merger.add(count_batch(like, rows, requests, source=source))
    return merger.result()


def saved(stats: Stats, path: Path) -> str:
    """Written to `path`; its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_stats(stats, path)
    return str(path)


def brute_sqnr_db(values: np.ndarray, limit: float) -> float:
    """SQNR of an array in INT8 with this range, element by element."""
    step = limit / 127
    error = np.clip(np.rint(values / step), -127, 127) * step - values
    return float(
        10
        * np.log10(np.sum(np.square(values, dtype=np.float64)) / np.sum(np.square(error, dtype=np.float64)))
    )


def many(
    rng: np.random.Generator, factors: Sequence[float], requests: int = 40
) -> list[dict[str, np.ndarray]]:
    return [draw(rng, requests, factor) for factor in factors]
