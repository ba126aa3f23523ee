"""Pins that other data would not ask for: between halves of the batches, and between real and random data."""

from __future__ import annotations

from diag.errors import TrtdiagError
from diag.feeds import open_feeds
from diag.pipeline.search.setup import Search
from diag.progress import Progress
from diag.search.pins import PinSearch
from diag.search.pins import unstable_pins as between_halves
from diag.search.rank import Ranking

_SEED = 0
_SMALL_GAIN = 0.02
"""Share of the damage that a pin must remove on random data to count as asked for there."""


def unstable_pins(search: Search, found: PinSearch, ranking: Ranking, progress: Progress) -> dict[str, str]:
    """Pins by id, and between which data they appear and vanish."""
    if found.outcome != "found":
        return {}
    unstable = dict.fromkeys(between_halves(found.pins, ranking.effects), "between halves of the data")
    for pin in _vanishing(search, found.pins, progress):
        unstable[pin] = f"{unstable[pin]}, and on random data" if pin in unstable else "on random data"
    return unstable


def _vanishing(search: Search, pins: list[str], progress: Progress) -> list[str]:
    """Pins without which one random batch is hardly worse."""
    number = _random_batch(search, progress)
    if number is None:
        return []
    with_all = search.variants.damage(search.target, search.low(pins), number)
    vanishing = []
    for pin in pins:
        without = search.variants.damage(search.target, search.low(set(pins) - {pin}), number)
        if not without > with_all * (1 + _SMALL_GAIN):
            vanishing.append(pin)
    return vanishing


def _random_batch(search: Search, progress: Progress) -> int | None:
    """One batch of random data in the shapes of the first real one; None where the model takes none."""
    if search.variants.has_own_metric:  # random data have no labels
        return None
    inputs = search.planned.model.inputs
    sizes = {
        dim or f"{name}.{axis}": search.variants.shapes()[name][axis]
        for name, info in inputs.items()
        for axis, dim in enumerate(info.shape or ())
        if not isinstance(dim, int)
    }
    options = ",".join([*(f"{name}={size}" for name, size in sizes.items()), "batches=1"])
    try:
        number = search.variants.add(open_feeds(f"random:{_SEED}:{options}", inputs).first())
        search.variants.damage(search.target, frozenset(), number)
    except TrtdiagError as error:
        progress.note(f"pins are not held against random data: {error.problem}")
        return None
    return number
