"""What a variant's outputs came to: sums that add up over batches, and can be written down."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from diag.compare.record import Record
from diag.numerics.distributions import DecisionSums
from diag.numerics.error import ErrorSums
from diag.pipeline.search.user_metric import OwnSums

Metrics = dict[str, dict[str, float]]
"""Metrics by output name."""

OWN = "(own metric)"
"""Stands in the place of an output's name for the user's own metric."""

BY_CHANNEL = "channel_min_sqnr_db"
"""The metric that needs sums by channel."""


@dataclass(frozen=True)
class Outcome:
    """Sums of every float output, and of the user's own metric."""

    records: Mapping[str, Record]
    own: OwnSums | None = None

    def without_channels(self) -> Outcome:
        """The same with totals in the place of sums by channel; logits have as many channels as tokens."""
        for record in self.records.values():
            record.sums.reference_square = np.array([record.sums.reference_square.sum()])
            record.sums.error_square = np.array([record.sums.error_square.sum()])
        return self

    def dump(self) -> str:
        """JSON; infinity and NaN as Python writes them."""
        records = {name: dataclasses.asdict(record) for name, record in self.records.items()}
        own = dataclasses.asdict(self.own) if self.own else None
        return json.dumps({"records": records, "own": own}, default=lambda array: array.tolist())

    @classmethod
    def load(cls, text: str) -> Outcome:
        """What `dump` wrote, bit for bit."""
        read = json.loads(text)
        records = {name: _record(fields) for name, fields in read["records"].items()}
        return cls(records, OwnSums(**read["own"]) if read["own"] else None)


def _record(fields: dict[str, Any]) -> Record:
    sums, decisions = fields.pop("sums"), fields.pop("decisions")
    signal, noise = (np.array(sums.pop(name)) for name in ("reference_square", "error_square"))
    place = tuple(fields.pop("worst_index"))
    kept = ErrorSums(signal, noise, **sums)
    return Record(**fields, worst_index=place, sums=kept, decisions=DecisionSums(**decisions))


def metrics_of(outcomes: Iterable[Outcome], by_channel: bool) -> Metrics:
    """Metrics over all of them, in their order. `by_channel`: they hold sums by channel."""
    total: dict[str, Record] = {}
    own: OwnSums | None = None
    for outcome in outcomes:
        for name, record in outcome.records.items():
            kept = total.setdefault(name, Record(record.kind, record.convolution, record.noise))
            kept.add(record)
        own = outcome.own if own is None or outcome.own is None else own + outcome.own
    found = {name: record.metrics() for name, record in total.items()}
    if not by_channel:
        for metrics in found.values():
            del metrics[BY_CHANNEL]
    return found | ({OWN: own.metrics()} if own else {})
