"""An axis of a picture: values to pixels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` at pixel `start` to `high` at pixel `end`, clamped at both ends."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)
