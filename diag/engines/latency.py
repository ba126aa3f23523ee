"""Times of repeated runs as a median with its 95 % interval: no assumption about their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one run. `low_ms` to `high_ms` holds the median with 95 % confidence."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int
    warmup: int
    """Runs before those that count."""

    def __str__(self) -> str:
        return (
            f"{self.median_ms:.4g} ms ({self.low_ms:.4g} to {self.high_ms:.4g}, median and 95 % interval of "
            f"{self.runs} runs after {self.warmup} to warm up)"
        )


def summarise(times_ms: Sequence[float], warmup: int = 0) -> Latency:
    """Median and the order statistics around it that hold it with 95 % confidence (binomial, normal tail).

    With fewer than six times the interval is the whole range, and holds the median with less confidence.
    Raises ValueError without any.
    """
    if not times_ms:
        raise ValueError("no time was measured")
    ordered = sorted(times_ms)
    count = len(ordered)
    half = 1.96 * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - half) - 1, 0)
    high = min(math.ceil(count / 2 + half), count - 1)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Latency(middle, ordered[low], ordered[high], count, warmup)
