"""Adding statistics: exact, so that parts of the data in any grouping and order give the same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from diag.calibration.samples import KEYS
from diag.drift.stats import SAMPLED, VARIES, WORST, Channels, Source, Stats
from diag.errors import StatsError
from diag.numerics.exact import total

_PENDING = 64
"""Sums that wait to be added at once."""


class Merger:
    """Takes in statistics one after the other; its memory does not grow."""

    def __init__(self, first: Stats) -> None:
        self._first = first
        self._counts = first.counts.copy()
        self._tallies = first.tallies.copy()
        self._extremes = first.extremes.copy()
        self._moments = [first.moments]
        self._sample = first.sample_keys, first.sample
        self._worst = first.worst_keys, first.worst
        self._labels = dict(first.labels)
        self._channels = dict(first.channels)
        self._source = first.source

    def add(self, other: Stats, name: str = "the statistics") -> None:
        """Take in one more. Raises StatsError, calling it `name`, when it cannot be added."""
        refuse_other(self._first, other, name)
        self._counts += other.counts
        self._tallies += other.tallies
        np.minimum(self._extremes[..., 0], other.extremes[..., 0], out=self._extremes[..., 0])
        np.maximum(self._extremes[..., 1], other.extremes[..., 1], out=self._extremes[..., 1])
        self._moments.append(other.moments)
        if len(self._moments) == _PENDING:
            self._moments = [total(tuple(self._moments))]
        self._sample = _joined_sample(*self._sample, other.sample_keys, other.sample)
        self._worst = _joined_worst(*self._worst, other.worst_keys, other.worst)
        self._labels |= other.labels
        if len(self._labels) > 4 * (SAMPLED + self._worst[0].size):
            self._labels = self._needed_labels()
        self._channels = _joined_channels(self._channels, other.channels)
        self._source = _joined_source(self._source, other.source)

    def result(self) -> Stats:
        """The sum so far; the merger may go on."""
        return Stats(
            self._first.model_sha256,
            self._first.table_sha256,
            self._first.tensors,
            self._counts.copy(),
            self._tallies.copy(),
            self._extremes.copy(),
            total(tuple(self._moments)),
            *self._sample,
            *self._worst,
            self._needed_labels(),
            dict(self._channels),
            self._source,
        )

    def _needed_labels(self) -> dict[int, str]:
        keys = np.unique(np.concatenate([self._sample[0], self._worst[0][self._worst[1] >= 0]]))
        return {key: self._labels[key] for key in keys.tolist()}


def merge(parts: Iterable[Stats]) -> Stats:
    """The sum of one or more statistics.

    Raises StatsError when they are of different models, tables or tensors, and when there is none.
    """
    merger: Merger | None = None
    for number, part in enumerate(parts, 1):
        if merger is None:
            merger = Merger(part)
        else:
            merger.add(part, f"part {number}")
    if merger is None:
        raise StatsError("there are no statistics to merge", "Give at least one.")
    return merger.result()


def refuse_other(first: Stats, other: Stats, name: str) -> None:
    """Raise StatsError unless both are of one model, one table and the same tensors with the same scales."""
    for what, mine, theirs in (
        ("model", first.model_sha256, other.model_sha256),
        ("calibration table", first.table_sha256, other.table_sha256),
    ):
        if mine != theirs:
            raise StatsError(
                f"{name} was made with another {what} ({_short(theirs)}) than the first ({_short(mine)})",
                f"Only statistics of one {what} can be put together.",
            )
    if first.tensors == other.tensors:
        return
    strange = [t.name for t in other.tensors if t.name not in first.index]
    strange += [t.name for t in first.tensors if t.name not in other.index]
    if strange or len(first) != len(other):
        shown = strange[0] if strange else other.tensors[0].name
        raise StatsError(
            f"{name} holds other tensors than the first, for example {shown!r}",
            "Profile both with the same command.",
        )
    differ = [b.name for a, b in zip(first.tensors, other.tensors, strict=True) if a != b]
    raise StatsError(
        f"{name} holds tensor {differ[0]!r} with another scale than the first",
        "Profile both with the same --calibration.",
    )


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else f"{sha256[:12]}..."


def _joined_sample(
    my_keys: NDArray[np.uint64],
    mine: NDArray[np.float32],
    their_keys: NDArray[np.uint64],
    theirs: NDArray[np.float32],
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """The smallest keys of both; a request that both hold counts once, with the larger figures."""
    if my_keys.size == SAMPLED and (their_keys > my_keys.max()).all():
        return my_keys, mine  # as soon as many requests were seen, nearly always
    keys, places = np.unique(np.concatenate([my_keys, their_keys]), return_inverse=True)
    kept = min(keys.size, SAMPLED)
    found = np.full((mine.shape[0], kept, mine.shape[2]), np.nan, np.float32)
    for figures, where in ((mine, places[: my_keys.size]), (theirs, places[my_keys.size :])):
        used = where < kept
        found[:, where[used]] = np.fmax(found[:, where[used]], figures[:, used])
    return keys[:kept], found


def _joined_worst(
    my_keys: NDArray[np.uint64],
    mine: NDArray[np.float32],
    their_keys: NDArray[np.uint64],
    theirs: NDArray[np.float32],
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """The largest damages of each tensor; a request that both hold counts once, with the larger one."""
    keys, damage = np.concatenate([my_keys, their_keys], axis=1), np.concatenate([mine, theirs], axis=1)
    return worst_of(keys, damage)


def worst_of(
    keys: NDArray[np.uint64], damage: NDArray[np.float32]
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Keys and damages of the `WORST` largest of each row, shape (T, WORST); 0 and -1 where there are fewer.

    Equal damages go by key.
    """
    missing = max(WORST - keys.shape[1], 0)
    keys = np.pad(keys, ((0, 0), (0, missing)))
    damage = np.pad(damage, ((0, 0), (0, missing)), constant_values=-1)
    order = np.lexsort((-damage, keys), axis=1)
    keys, damage = np.take_along_axis(keys, order, axis=1), np.take_along_axis(damage, order, axis=1)
    damage[:, 1:][keys[:, 1:] == keys[:, :-1]] = -1
    keys[damage < 0] = 0
    order = np.lexsort((keys, -damage), axis=1)[:, :WORST]
    return np.take_along_axis(keys, order, axis=1), np.take_along_axis(damage, order, axis=1)


def _joined_channels(mine: Mapping[str, Channels], theirs: Mapping[str, Channels]) -> dict[str, Channels]:
    found = dict(mine)
    for name, other in theirs.items():
        found[name] = _added(found[name], other) if name in found else other
    return dict(sorted(found.items()))


def _added(mine: Channels, theirs: Channels) -> Channels:
    if mine.absmax.shape != theirs.absmax.shape or not mine.absmax.size:
        return VARIES
    return Channels(
        np.maximum(mine.absmax, theirs.absmax), mine.sums + theirs.sums, mine.elements + theirs.elements
    )


def _joined_source(mine: Source, theirs: Source) -> Source:
    return dataclasses.replace(
        mine,
        batches=mine.batches + theirs.batches,
        requests=mine.requests + theirs.requests,
        seen=mine.seen + theirs.seen,
        dropped=mine.dropped + theirs.dropped,
        errors=mine.errors + theirs.errors,
        last_error=max(mine.last_error, theirs.last_error),
        identity=(mine.identity + theirs.identity) % KEYS,
        seeds=mine.seeds | theirs.seeds,
        begun=min(mine.begun, theirs.begun),
        ended=max(mine.ended, theirs.ended),
    )
