"""Counts the tensors of one batch: arrays in, statistics out. Batches may be counted in different threads.

Every figure is a function of one request's values alone, or a sum of such: how requests are put into batches
leaves no trace, except where the model itself computes them differently.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.calibration import samples
from diag.calibration.sums import MOST_CHANNELS, channel_extremes
from diag.drift.counting import Rows, count_tensor, not_seen
from diag.drift.merge import Merger, worst_of
from diag.drift.stats import FIGURES, HALVES, MOMENTS, SAMPLED, VARIES, Channels, Source, Stats
from diag.numerics.exact import ExactSums

Array = NDArray[Any]
Double = NDArray[np.float64]

_MOST = float(np.finfo(np.float64).max)
_LABEL_LENGTH = 200
_SHORT = np.uint32(0xFFFF0000)
"""The bits of a float32 that remain of a sampled figure."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one batch: samples along axis 0, or the whole batch where inputs differ in it."""

    keys: NDArray[np.uint64]
    """A hash of inputs and label, shape (R,); the lowest bit says which half a request is in."""
    labels: tuple[str, ...]
    identity: int
    """Sum of the hashes of the inputs, modulo 2^256."""

    @property
    def halves(self) -> NDArray[np.intp]:
        return (self.keys & np.uint64(1)).astype(np.intp)


def requests_of(batch: Mapping[str, Array], label: str | Sequence[str]) -> Requests:
    """The requests of a batch of inputs. `label`: of the batch, or one for each request."""
    hashes = samples.sample_keys(batch)
    if isinstance(label, str):
        labels = [label] if len(hashes) == 1 else [f"{label}[{i}]" for i in range(len(hashes))]
    else:
        labels = list(label)
    labels = [text[-_LABEL_LENGTH:] for text in labels]
    keys = [_key(found, text) for found, text in zip(hashes, labels, strict=True)]
    return Requests(np.array(keys, np.uint64), tuple(labels), sum(hashes) % samples.KEYS)


def _key(inputs: int, label: str) -> int:
    digest = hashlib.sha256(inputs.to_bytes(32, "big") + label.encode()).digest()
    return (int.from_bytes(digest[:8], "big") & ~1) | (inputs & 1)


def count_batch(
    like: Stats,
    values: Mapping[str, Array],
    requests: Requests,
    axes: Mapping[str, int] | None = None,
    source: Source | None = None,
) -> Stats:
    """Statistics of one batch, to be merged with `like` (`empty_stats` of the model, table and tensors).

    `values`: the tensors by name, any shape and numeric type; some may be absent. `axes`: the channel axis
    (1 or -1) of each tensor whose channels are asked for. `source`: by default one batch of these requests.
    """
    halves = requests.halves
    found = [
        count_tensor(np.asarray(values[t.name]), t, halves) if t.name in values else not_seen(halves)
        for t in like.tensors
    ]
    figures = _Figures(found, requests)
    sample_keys, sample = figures.sample()
    worst_keys, worst = figures.worst()
    stats = dataclasses.replace(
        like,
        counts=np.stack([rows.counts for rows in found]),
        tallies=np.stack([rows.tallies for rows in found]),
        extremes=np.stack([rows.extremes for rows in found]),
        moments=figures.moments(),
        sample_keys=sample_keys,
        sample=sample,
        labels=dict(zip(requests.keys.tolist(), requests.labels, strict=True)),
        channels={
            name: _channels(np.asarray(values[name]), axis)
            for name, axis in (axes or {}).items()
            if name in values and np.size(values[name])
        },
        source=source or Source(batches=1, requests=len(requests.labels), identity=requests.identity),
        worst_keys=worst_keys,
        worst=worst,
    )
    return Merger(stats).result()  # leaves out the names that are not needed


class _Figures:
    """Figures of all tensors and requests of one batch, each of shape (T, R).

    A tensor that cannot be told by requests stands in the first one's place, with zeros for the others.
    """

    def __init__(self, found: Sequence[Rows], requests: Requests) -> None:
        self._requests = requests
        size = len(requests.labels)
        self._told = np.array([rows.elements.size == size for rows in found])
        self._named = {
            name: np.stack([_filled(rows.figures[name], size) for rows in found]) for name in found[0].figures
        }
        self._named["elements"] = np.stack([_filled(rows.elements, size) for rows in found])
        self._seen = np.array([bool(rows.tallies.any()) for rows in found])
        self._bad = np.stack([_filled(rows.bad, size) for rows in found])

    def moments(self) -> ExactSums:
        """Products beyond float64 count as its largest number."""
        halves = self._requests.halves
        with np.errstate(over="ignore"):
            products = self._products()
        table = np.zeros((self._told.size, HALVES, len(MOMENTS), halves.size))
        for place, name in enumerate(MOMENTS):
            for half in range(HALVES):
                table[:, half, place, halves == half] = products[name][:, halves == half]
        return ExactSums.of(np.clip(table.reshape(-1, halves.size), -_MOST, _MOST))

    def _products(self) -> dict[str, Double]:
        f = self._named
        return {
            **{name: f[name] for name in ("sum", "energy", "noise", "clipped_energy", "absmax")},
            "absmax_squared": f["absmax"] ** 2,
            "energy_squared": f["energy"] ** 2,
            "noise_squared": f["noise"] ** 2,
            "noise_energy": f["noise"] * f["energy"],
            "clipped_energy_squared": f["clipped_energy"] ** 2,
            "clipped_energy_energy": f["clipped_energy"] * f["energy"],
            "clipped_squared": f["clipped"] ** 2,
            "clipped_elements": f["clipped"] * f["elements"],
            "elements_squared": f["elements"] ** 2,
        }

    def sample(self) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        keys = self._requests.keys
        order = np.argsort(keys)[:SAMPLED]
        energy = self._named["energy"]
        figures = {
            "absmax": self._named["absmax"],
            "clipped_energy_ratio": _ratio(self._named["clipped_energy"], energy),
            "noise_ratio": _ratio(self._named["noise"], energy),
        }
        table = np.stack([figures[name][:, order] for name in FIGURES], axis=2)
        table[~(self._told & self._seen)] = np.nan
        return keys[order], _shortened(table)

    def worst(self) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        damage = _ratio(self._named["noise"], self._named["energy"]).astype(np.float32)
        damage[self._bad] = np.inf
        damage[~self._told, 1:] = -1
        damage[~self._seen] = -1
        keys = np.broadcast_to(self._requests.keys, damage.shape).copy()
        return worst_of(keys, damage)


def _filled(row: NDArray[Any], size: int) -> NDArray[Any]:
    if row.size == size:
        return row
    found = np.zeros(size, row.dtype)
    found[0] = row[0]
    return found


def _ratio(part: Double, whole: Double) -> Double:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _shortened(figures: Double) -> NDArray[np.float32]:
    """In float32 without the last 16 bits."""
    with np.errstate(over="ignore"):
        bits = figures.astype(np.float32).view(np.uint32)
    return np.asarray((bits & _SHORT).view(np.float32))


def _channels(array: Array, axis: int) -> Channels:
    values = np.asarray(array, np.float32)
    bad = ~np.isfinite(values)
    values = np.ascontiguousarray(np.where(bad, np.float32(0), values) if bad.any() else values)
    low, high = channel_extremes(values, axis)
    if values.ndim < 2 or not 1 < low.size <= MOST_CHANNELS:
        return VARIES
    moved = np.moveaxis(values, 1 if axis == 1 else -1, 0).reshape(low.size, -1).astype(np.float64)
    sums = np.concatenate([moved.sum(axis=1), np.square(moved).sum(axis=1)])
    return Channels(np.abs(np.maximum(-low, high)), ExactSums.of(sums[:, None]), moved.shape[1])
