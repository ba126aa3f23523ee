"""Per-layer comparison as batches stream by: accumulated and local error of every observed tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from diag.compare.record import Array, Record
from diag.files import replacing
from diag.numerics.distributions import DecisionSums
from diag.numerics.error import ErrorSums
from diag.numerics.measured import TensorKind

_CHANNEL_SUMS = ("reference_square", "error_square")


@dataclass(frozen=True, slots=True)
class Observed:
    """One tensor of one batch: the reference, and what differs from it (None: identical)."""

    tensor: str
    reference: Array
    emulated: Array | None
    local: Array | None


@dataclass
class Comparison:
    """Records by tensor name; grows with the model, not with the data."""

    kinds: Mapping[str, TensorKind] = field(default_factory=dict)
    accumulated: dict[str, Record] = field(default_factory=dict)
    local: dict[str, Record] = field(default_factory=dict)
    batches: int = 0
    """Batches taken in so far."""
    samples: int = 0

    def observe(self, batch: int, seen: Observed) -> None:
        """Take in one tensor of one batch. Different tensors may be observed from different threads."""
        if seen.emulated is not None:
            self._record(self.accumulated, seen.tensor).update(batch, seen.reference, seen.emulated)
        if seen.local is not None and seen.local is not seen.emulated:
            self._record(self.local, seen.tensor).update(batch, seen.reference, seen.local)
        elif seen.local is not None:  # nothing before the layer is lowered: both errors are one
            self.local[seen.tensor] = self.accumulated[seen.tensor]

    def _record(self, records: dict[str, Record], tensor: str) -> Record:
        if tensor not in records:
            records[tensor] = Record.of(self.kinds.get(tensor, TensorKind()))
        return records[tensor]

    def save(self, path: Path, key: str) -> None:
        """Keep everything so far; `key` says which run it belongs to."""
        shared = dict.fromkeys(n for n, record in self.local.items() if record is self.accumulated.get(n))
        own = {name: record for name, record in self.local.items() if name not in shared}
        packed = [_pack(records) for records in (self.accumulated, own)]
        header = {
            "key": key,
            "batches": self.batches,
            "samples": self.samples,
            "shared": list(shared),
            "records": [scalars for scalars, _ in packed],
        }
        arrays = [array for _, arrays in packed for array in arrays]
        with replacing(path) as partial, partial.open("wb") as stream:
            np.savez(
                stream,
                header=np.frombuffer(json.dumps(header).encode(), np.uint8),
                channels=np.concatenate([*arrays, np.zeros(0)]),
            )

    def load(self, path: Path, key: str) -> bool:
        """Take up what `save` kept, if it is this run's; False when there is nothing to take up."""
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as saved:
                header = json.loads(saved["header"].tobytes().decode())
                channels = saved["channels"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return False
        if header.get("key") != key:
            return False
        self.batches, self.samples = header["batches"], header["samples"]
        take = _taker(channels)
        self.accumulated = _unpack(header["records"][0], take)
        self.local = _unpack(header["records"][1], take)
        self.local.update({name: self.accumulated[name] for name in header["shared"]})
        return True


def _pack(records: Mapping[str, Record]) -> tuple[list[dict[str, object]], list[np.ndarray]]:
    scalars, arrays = [], []
    for name, record in records.items():
        row = asdict(record)
        for key in _CHANNEL_SUMS:
            array = row["sums"].pop(key)
            row["sums"][f"{key}_length"] = array.size
            arrays.append(array)
        scalars.append({"tensor": name, **row})
    return scalars, arrays


def _taker(channels: np.ndarray) -> Callable[[int], np.ndarray]:
    position = 0

    def take(length: int) -> np.ndarray:
        nonlocal position
        position += length
        return channels[position - length : position].copy()

    return take


def _unpack(rows: Sequence[dict[str, object]], take: Callable[[int], np.ndarray]) -> dict[str, Record]:
    records = {}
    for row in rows:
        fields = dict(row)
        name = str(fields.pop("tensor"))
        sums = dict(fields.pop("sums"))  # type: ignore[call-overload]
        channels = {key: take(sums.pop(f"{key}_length")) for key in _CHANNEL_SUMS}
        record = Record(**fields)  # type: ignore[arg-type]
        record.sums = ErrorSums(**{**channels, **sums})
        record.decisions = DecisionSums(**fields["decisions"])  # type: ignore[arg-type]
        record.worst_index = tuple(record.worst_index)
        records[name] = record
    return records
