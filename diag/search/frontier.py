"""Sets of pins worth a point in the picture of accuracy against price."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MOST_SIZES = 8


def best_by_size(
    sets: Iterable[frozenset[str]],
    chosen_damage: Callable[[frozenset[str]], float],
    held_damage: Callable[[frozenset[str]], float],
    most_sizes: int = MOST_SIZES,
    tried_each: int = 2,
) -> list[frozenset[str]]:
    """For each number of pins, the set with the least damage on held-out data, smallest first.

    Of the sets of one size only the `tried_each` that did best on the chosen data are held out; sizes are
    thinned out evenly to `most_sizes`.
    """
    sizes: dict[int, list[frozenset[str]]] = {}
    for pins in sets:
        sizes.setdefault(len(pins), []).append(pins)
    found = []
    for size in _spaced(sorted(sizes), most_sizes):
        nearest = sorted(sizes[size], key=chosen_damage)[:tried_each]
        found.append(min(nearest, key=held_damage))
    return found


def _spaced(sizes: list[int], most: int) -> list[int]:
    """At most `most` of them, evenly, the first and the last among them."""
    if len(sizes) <= most:
        return sizes
    step = (len(sizes) - 1) / (most - 1)
    return [sizes[round(i * step)] for i in range(most)]


def dominated(error: float, price: float, others: Iterable[tuple[float, float]]) -> bool:
    """Whether another point (error, price) is no worse in both and better in one."""
    return any(e <= error and p <= price and (e < error or p < price) for e, p in others)
