"""Runs of a switchable model that variants can start from, kept while there is memory for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from diag.compare.record import Array
from diag.engines.switchable import Switchable, Trace

_MOST_BYTES = 1 << 30
_FEWEST = 3
"""Kept whatever they take: the reference, the fully lowered model, and the set that is being thinned."""


class Traces:
    """Every run is kept; those that nothing started from for longest go first."""

    def __init__(self, switchable: Switchable, most_bytes: int = _MOST_BYTES) -> None:
        self._switchable = switchable
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[int, frozenset[str]], tuple[Trace, int]] = OrderedDict()

    def run(self, number: int, feed: Mapping[str, Array], low: frozenset[str]) -> Mapping[str, Array]:
        """Outputs of batch `number` under an assignment, begun where the nearest kept run differs from it."""
        wanted = low & self._switchable.switches
        base = self._nearest(number, wanted)
        if base is None:
            base = self._begin(number, feed)
        trace = self._switchable.follow(base, wanted)
        self._keep(number, trace, trace.bytes_beside(base))
        return trace.outputs

    def _begin(self, number: int, feed: Mapping[str, Array]) -> Trace:
        """The first run of a batch has everything in high precision: the reference, where that is one."""
        trace = self._switchable.trace(feed, ())
        self._keep(number, trace, trace.bytes_beside(None))
        return trace

    def _nearest(self, number: int, low: frozenset[str]) -> Trace | None:
        known = [key for key in self._kept if key[0] == number]
        if not known:
            return None
        nearest = max(known, key=lambda key: self._switchable.difference(self._kept[key][0], low))
        self._kept.move_to_end(nearest)
        return self._kept[nearest][0]

    def _keep(self, number: int, trace: Trace, size: int) -> None:
        self._kept.setdefault((number, trace.low), (trace, size))
        self._kept.move_to_end((number, trace.low))
        while len(self._kept) > _FEWEST and sum(size for _, size in self._kept.values()) > self._most_bytes:
            self._kept.popitem(last=False)
