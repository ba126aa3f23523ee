"""Pins under a ceiling: on their number, their price, or both."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from diag.search.programme import cheapest_set
from diag.search.rank import Effect


def affordable(
    pins: Collection[str],
    prices: Mapping[str, float],
    most_pins: float = math.inf,
    most_price: float = math.inf,
) -> bool:
    """Whether the pins keep to both ceilings."""
    return len(pins) <= most_pins and sum(prices[pin] for pin in pins) <= most_price


def within(
    effects: Sequence[Effect],
    prices: Mapping[str, float],
    most_pins: float = math.inf,
    most_price: float = math.inf,
) -> list[frozenset[str]]:
    """Sets worth a measurement that keep to the ceilings: those that remove the most damage.

    One for each measure of a candidate's damage (lowered alone, raised alone, the larger share of the two).
    """
    lowered = _shares([e.lowered_mean for e in effects])
    raised = _shares([e.raised_mean for e in effects])
    sets = [
        _most_removed(effects, worth, prices, most_pins, most_price)
        for worth in (np.maximum(lowered, raised), lowered, raised)
    ]
    return list(dict.fromkeys(sets))


def _shares(damages: Sequence[float]) -> np.ndarray:
    values: np.ndarray = np.clip(np.nan_to_num(damages, posinf=1e30), 0.0, None)
    shares: np.ndarray = values / max(values.sum(), 1e-300)
    return shares


def _most_removed(
    effects: Sequence[Effect],
    worth: np.ndarray,
    prices: Mapping[str, float],
    most_pins: float,
    most_price: float,
) -> frozenset[str]:
    """The knapsack: most worth in the set, its number and price under the ceilings."""
    cost = np.array([prices[effect.candidate.id] for effect in effects])
    rows = np.vstack([np.ones(len(effects)), cost])
    return cheapest_set(effects, -worth, rows, most=[most_pins, most_price])
