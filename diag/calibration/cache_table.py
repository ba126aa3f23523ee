"""TensorRT calibration caches as calibration tables, and tables as caches."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from diag.calibration.cache_names import CacheNames, match_names
from diag.calibration.scale_rules import scale_rules
from diag.calibration.table import (
    IMPORTED,
    CacheRecord,
    CalibrationTable,
    MethodRange,
    TensorRange,
    read_table,
)
from diag.engines.scale_cache import (
    ENTROPY,
    MINMAX,
    ScaleCache,
    cache_text,
    read_scale_cache,
    scale_of,
    scale_text,
)
from diag.errors import TableError, UsageError
from diag.model.graph import Model
from diag.numerics.formats import FORMATS

_HEAD = b"TRT-"
_VERSION = re.compile(r"\d+(\.\d+)*", re.ASCII)
_STEPS = FORMATS["int8"].max
"""Range over scale in a cache."""


def is_cache(path: str | Path) -> bool:
    """Whether a file begins as a calibration cache does; False for a file that cannot be read."""
    try:
        with Path(path).open("rb") as stream:
            return stream.read(len(_HEAD)) == _HEAD
    except OSError:
        return False


def read_calibration(path: str | Path, model: Model, needed: Collection[str]) -> CalibrationTable:
    """Read `--calibration FILE`: a table, or a TensorRT cache.

    Raises TableError when it is another model's, or gives a tensor of `needed` a scale that is none.
    """
    return read_cache(path, model, needed) if is_cache(path) else read_table(path, model.sha256)


def read_cache(path: str | Path, model: Model, needed: Collection[str]) -> CalibrationTable:
    """Read a TensorRT cache as a table. Raises TableError as `read_calibration` does."""
    cache = read_scale_cache(path)
    names = match_names(cache.scales, model)
    refuse_foreign(path, names, needed)
    return table_from_cache(path, cache, names, model)


def refuse_foreign(path: str | Path, names: CacheNames, needed: Collection[str]) -> None:
    """Raises TableError when a cache is another model's: its names do not match."""
    covered = len(set(needed).intersection(names.activations))
    if names.fit_share >= scale_rules().fit_share and (covered or not needed):
        return
    wrong = names.unmatched or names.made or names.activations
    raise TableError(
        f"calibration cache {str(path)!r} is another model's: {covered} of {len(needed)} tensors that are "
        f"quantized have a scale, and {len(names.unmatched)} names fit nothing, the first {wrong[0]!r}",
        "Give this model's cache, or calibrate.",
    )


def table_from_cache(
    path: str | Path, cache: ScaleCache, names: CacheNames, model: Model
) -> CalibrationTable:
    """The table of the model's tensors in a cache. Infinite scales quantize to nothing and are left out.

    Raises TableError when a tensor's scale is zero, negative or NaN: no engine can be built with it.
    """
    scales = {name: cache.scales[name] for name in names.activations}
    broken = [name for name, scale in scales.items() if not scale > 0]
    if broken:
        raise TableError(
            f"calibration cache {str(path)!r} gives {len(broken)} tensor(s) a scale that is zero, negative "
            f"or NaN, the first {broken[0]!r} ({scales[broken[0]]:g})",
            "Calibrate again with data that reach it.",
        )
    return imported_table(
        {name: scale * _STEPS for name, scale in scales.items() if math.isfinite(scale)},
        model,
        f"TensorRT cache {Path(path).name} ({cache.version}, {cache.algorithm})",
        hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        CacheRecord(
            version=cache.version,
            algorithm=cache.algorithm,
            scales={name: scale_text(scale) for name, scale in cache.scales.items()},
        ),
    )


def imported_table(
    ranges: Mapping[str, float], model: Model, source: str, sha256: str, cache: CacheRecord | None = None
) -> CalibrationTable:
    """A table of ranges that others chose (largest magnitude of each tensor); nothing in it was measured."""
    return CalibrationTable(
        schema="trtdiag.calibration/1",
        model_sha256=model.sha256,
        data=source,
        data_sha256=sha256,
        method=IMPORTED,
        batches=0,
        cache=cache,
        tensors={name: _imported(limit) for name, limit in ranges.items()},
    )


def _imported(limit: float) -> TensorRange:
    cost = MethodRange(absmax=limit, clipped_share=None, clipped_energy_ratio=None)
    return TensorRange(absmax=limit, minimum=-limit, maximum=limit, elements=0, methods={IMPORTED: cost})


def cache_from_table(table: CalibrationTable, version: str | None, method: str | None) -> str:
    """The text of a cache that holds the scales of a table, INT8's, by `method` (None: the table's own).

    A table that was imported from a cache gives that cache again, entry for entry. `version` is the
    TensorRT's that shall read it, which ignores any other's. Raises UsageError when it is not known or
    none,
    TableError when the table lacks the method.
    """
    chosen = method or table.method
    kept = table.cache if chosen == IMPORTED else None
    if version is None and kept is None:
        raise UsageError(
            "TensorRT ignores a cache whose header names another version",
            "Say which TensorRT shall read it, --tensorrt-version 10.6.0 for example.",
        )
    if version is not None and not _VERSION.fullmatch(version):
        raise UsageError(f"{version!r} is no version of TensorRT", "Write it as 10.6.0.")
    scales = table.scales("int8", chosen)
    if kept is None:
        return cache_text(str(version), MINMAX if chosen == "minmax" else ENTROPY, scales)
    whole = {name: scale_of(text) for name, text in kept.scales.items()}
    return cache_text(version or kept.version, kept.algorithm, whole)
