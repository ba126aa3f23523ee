"""Statistics as a file: a NumPy archive (.npz, whatever its name) of a few plain arrays; nothing is pickled.

| array | content |
|---|---|
| `header` | JSON, UTF-8 bytes: schema, hashes, tensors, source, names of the requests |
| `spans` | (2 T, 2): first and last + 1 bin that is not empty, of each tensor and half |
| `counts` | these bins' counts, all tensors and halves one after the other, as byte planes |
| `tallies`, `extremes` | as in `diag.drift.stats.Stats` |
| `moments` | digits of the exact sums (`diag.numerics.exact`) |
| `sample_keys`, `sample` | requests of which single figures are kept; the figures' upper 16 bits |
| `worst_keys`, `worst` | the worst requests of each tensor |
| `channel_sizes`, `channel_elements`, `channel_absmax`, `channel_digits` | where channels were asked for |

Equal statistics give equal bytes.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diag.drift.bins import BINS
from diag.drift.stats import (
    FIGURES,
    HALVES,
    MOMENTS,
    SAMPLED,
    SCHEMA,
    TALLIES,
    WORST,
    Channels,
    Source,
    Stats,
    Tensor,
)
from diag.errors import StatsError
from diag.files import replacing
from diag.numerics.exact import ExactSums

Arrays = dict[str, NDArray[Any]]

_MOST_BYTES = 1 << 30
"""A file that says it holds more, unpacked, is not read."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False)


class TensorHeader(_Part):
    """A tensor that was counted, and the range that the bins are relative to."""

    name: str
    kind: Literal["input", "activation", "output"]
    range: float = Field(gt=0)
    scale_from: Literal["table", "data", "unit"]


class SourceHeader(_Part):
    """What the statistics were taken from; see `diag.drift.stats.Source`."""

    batches: int = Field(0, ge=0)
    requests: int = Field(0, ge=0)
    seen: int = Field(0, ge=0)
    dropped: int = Field(0, ge=0)
    errors: int = Field(0, ge=0)
    last_error: str = ""
    identity: str = Field("0" * 64, pattern="^[0-9a-f]{64}$")
    seeds: tuple[int, ...] = ()
    begun: float | None = None
    ended: float | None = None


class StatsHeader(_Part):
    """The array `header` of a file of activation statistics."""

    schema_: str = Field(SCHEMA, alias="schema", pattern="^trtdiag\\.stats/1$")
    model_sha256: str
    table_sha256: str | None
    tensors: tuple[TensorHeader, ...]
    source: SourceHeader
    labels: dict[str, str]
    """Names of the requests that are sampled or among the worst, by key (16 hexadecimal digits)."""
    channels: tuple[str, ...] = ()
    """Tensors with channels, in the order of `channel_sizes`."""
    moments_lowest: int = Field(ge=-40, le=40)
    """Place of the first column of `moments`."""
    channels_lowest: tuple[int, ...] = ()


def write_stats(stats: Stats, path: str | Path) -> None:
    """Write statistics, whole or not at all. Raises OutputError."""
    body = stats_bytes(stats)
    with replacing(Path(path)) as partial:
        partial.write_bytes(body)


def stats_bytes(stats: Stats) -> bytes:
    """The file's bytes; equal for equal statistics."""
    arrays = {"header": np.frombuffer(_header(stats).encode(), np.uint8), **_arrays(stats)}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue())
    return stream.getvalue()


def _header(stats: Stats) -> str:
    source = stats.source
    header = {
        "schema": SCHEMA,
        "model_sha256": stats.model_sha256,
        "table_sha256": stats.table_sha256,
        "tensors": [
            {"name": t.name, "kind": t.kind, "range": t.range, "scale_from": t.scale_from}
            for t in stats.tensors
        ],
        "source": {
            "batches": source.batches,
            "requests": source.requests,
            "seen": source.seen,
            "dropped": source.dropped,
            "errors": source.errors,
            "last_error": source.last_error,
            "identity": f"{source.identity:064x}",
            "seeds": sorted(source.seeds),
            "begun": source.begun if np.isfinite(source.begun) else None,
            "ended": source.ended if np.isfinite(source.ended) else None,
        },
        "labels": {f"{key:016x}": label for key, label in sorted(stats.labels.items())},
        "channels": list(stats.channels),
        "moments_lowest": stats.moments.lowest,
        "channels_lowest": [found.sums.lowest for found in stats.channels.values()],
    }
    return json.dumps(header, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _arrays(stats: Stats) -> Arrays:
    spans, counts = _trimmed(stats.counts.reshape(-1, BINS))
    arrays: Arrays = {
        "spans": spans,
        "counts": _planes(counts),
        "tallies": _planes(stats.tallies.reshape(-1)),
        "extremes": stats.extremes,
        "moments": stats.moments.digits.T.astype(np.int32),
        "sample_keys": stats.sample_keys,
        "sample": (stats.sample.view(np.uint32) >> 16).astype(np.uint16),
        "worst_keys": stats.worst_keys,
        "worst": stats.worst,
    }
    channels = list(stats.channels.values())
    if channels:
        digits = [found.sums.digits for found in channels]
        arrays |= {
            "channel_sizes": np.array([(f.absmax.size, f.sums.digits.shape[1]) for f in channels], np.int64),
            "channel_elements": np.array([f.elements for f in channels], np.int64),
            "channel_absmax": np.concatenate([f.absmax for f in channels]),
            "channel_digits": np.concatenate([d.T.reshape(-1) for d in digits]).astype(np.int32),
        }
    return arrays


def _trimmed(rows: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """First and last + 1 bin of each row that is not empty, and the counts between."""
    filled = rows > 0
    any_filled = filled.any(axis=1)
    first = np.where(any_filled, filled.argmax(axis=1), 0)
    last = np.where(any_filled, rows.shape[1] - filled[:, ::-1].argmax(axis=1), 0)
    kept = [row[a:b] for row, a, b in zip(rows, first, last, strict=True)]
    return np.stack([first, last], axis=1).astype(np.uint16), np.concatenate([*kept, np.zeros(0, np.int64)])


def _planes(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """All lowest bytes, then all second bytes, and so on, as many as the largest needs: packs well."""
    size = max((int(counts.max(initial=0)).bit_length() + 7) // 8, 1)
    return counts.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :size].T


def is_stats(path: str | Path) -> bool:
    """Whether a file looks like statistics (it may be damaged), and not like a table, which is JSON."""
    try:
        with Path(path).open("rb") as stream:
            return stream.read(2) == b"PK"
    except OSError:
        return False


def read_stats(path: str | Path) -> Stats:
    """Read statistics. Raises StatsError when there are none, or they are cut off or damaged."""
    name = f"statistics {str(path)!r}"
    try:
        body = Path(path).read_bytes()
    except OSError as error:
        raise StatsError(f"{name} cannot be read: {error.strerror or error}", "Check the path.") from error
    if not body:
        raise StatsError(f"{name} is an empty file", "Make it again with trtdiag profile.")
    try:
        return _parsed(_unpacked(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        problem = f"{name} holds no {SCHEMA} statistics: {first['msg']} at {place}"
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        problem = f"{name} is no file of statistics, or is cut off ({error})"
    except KeyError as error:
        problem = f"{name} holds no {SCHEMA} statistics: there is no array {error}"
    except (ValueError, OverflowError, OSError, SyntaxError, RecursionError) as error:
        problem = f"{name} is damaged ({error})"
    raise StatsError(problem, "Make it again with trtdiag profile.")


def _unpacked(body: bytes) -> Arrays:
    arrays: Arrays = {}
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MOST_BYTES:
            raise ValueError("it claims to hold more than a gigabyte")
        for info in archive.infolist():
            with archive.open(info) as member:
                found = np.lib.format.read_array(member, allow_pickle=False)
                member.read(1)  # to the end, where the checksum is
            arrays[info.filename.removesuffix(".npy")] = found
    return arrays


def _parsed(arrays: Arrays) -> Stats:
    header = StatsHeader.model_validate_json(arrays["header"].tobytes())
    tensors = tuple(Tensor(t.name, t.kind, t.range, t.scale_from) for t in header.tensors)
    size = len(tensors)
    keys = _shaped(arrays["sample_keys"], np.uint64, (-1,))
    if size == 0 or len({t.name for t in tensors}) < size or keys.size > SAMPLED:
        raise ValueError("it holds no tensors, or one of them twice")
    moments = _shaped(arrays["moments"], np.int32, (-1, size * HALVES * len(MOMENTS)))
    sample = _shaped(arrays["sample"], np.uint16, (size, keys.size, len(FIGURES)))
    stats = Stats(
        header.model_sha256,
        header.table_sha256,
        tensors,
        _widened(arrays, size * HALVES).reshape(size, HALVES, BINS),
        _from_planes(arrays["tallies"]).reshape(size, HALVES, len(TALLIES)),
        _shaped(arrays["extremes"], np.float64, (size, HALVES, 2)),
        ExactSums(np.ascontiguousarray(moments.T, np.int64), header.moments_lowest),
        keys,
        (sample.astype(np.uint32) << 16).view(np.float32),
        _shaped(arrays["worst_keys"], np.uint64, (size, WORST)),
        _shaped(arrays["worst"], np.float32, (size, WORST)),
        {int(key, 16): label for key, label in header.labels.items()},
        _channels(header, arrays),
        _source(header.source),
    )
    named = set(keys.tolist()) | set(stats.worst_keys[stats.worst >= 0].tolist())
    if not named <= stats.labels.keys() or not set(stats.channels) <= stats.index.keys():
        raise ValueError("its parts contradict each other")
    return stats


def _shaped(array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    fits = array.ndim == len(shape) and all(w in (-1, g) for g, w in zip(array.shape, shape, strict=True))
    if array.dtype != dtype or not fits:
        raise ValueError(f"an array of shape {array.shape} and type {array.dtype} where {shape} is due")
    return array


def _from_planes(planes: NDArray[Any]) -> NDArray[np.int64]:
    if planes.dtype != np.uint8 or planes.ndim != 2 or not 1 <= planes.shape[0] <= 8:
        raise ValueError("no byte planes of counts")
    counts: NDArray[np.int64] = planes[-1].astype(np.int64)
    for plane in planes[-2::-1]:
        np.left_shift(counts, 8, out=counts)
        np.bitwise_or(counts, plane, out=counts)
    if counts.min(initial=0) < 0:
        raise ValueError("a count below zero")
    return counts


def _widened(arrays: Arrays, rows: int) -> NDArray[np.int64]:
    spans = _shaped(arrays["spans"], np.uint16, (rows, 2)).astype(np.int64)
    counts = _from_planes(arrays["counts"])
    sizes = spans[:, 1] - spans[:, 0]
    if (sizes < 0).any() or (spans > BINS).any() or sizes.sum() != counts.size:
        raise ValueError("bins that do not fit their counts")
    found = np.zeros((rows, BINS), np.int64)
    start = 0
    for row, (first, last) in zip(found, spans.tolist(), strict=True):
        row[first:last] = counts[start : start + last - first]
        start += last - first
    return found


def _channels(header: StatsHeader, arrays: Arrays) -> Mapping[str, Channels]:
    if not header.channels:
        return {}
    number = len(header.channels)
    sizes = _shaped(arrays["channel_sizes"], np.int64, (number, 2))
    elements = _shaped(arrays["channel_elements"], np.int64, (number,))
    ends = np.cumsum(sizes[:, 0])
    digit_ends = np.cumsum(2 * sizes[:, 0] * sizes[:, 1])
    absmax = np.split(_shaped(arrays["channel_absmax"], np.float32, (int(ends[-1]),)), ends[:-1])
    digits = np.split(
        _shaped(arrays["channel_digits"], np.int32, (int(digit_ends[-1]),)).astype(np.int64), digit_ends[:-1]
    )
    return {
        name: Channels(
            absmax[i],
            ExactSums(digits[i].reshape(int(columns), 2 * int(size)).T.copy(), header.channels_lowest[i]),
            int(elements[i]),
        )
        for i, (name, (size, columns)) in enumerate(zip(header.channels, sizes, strict=True))
    }


def _source(found: SourceHeader) -> Source:
    return Source(
        found.batches,
        found.requests,
        found.seen,
        found.dropped,
        found.errors,
        found.last_error,
        int(found.identity, 16),
        frozenset(found.seeds),
        np.inf if found.begun is None else found.begun,
        -np.inf if found.ended is None else found.ended,
    )
