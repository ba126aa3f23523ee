"""Smaller steps for the channels of weights, where clipping a few large values costs the output less."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diag.compensation.draft import Draft
from diag.compensation.layer_error import Reference, gain_db, rounded_channels
from diag.compensation.sites import Site
from diag.compensation.smoothing import weights_of

Float = NDArray[np.float32]


def search_weight_ratios(
    draft: Draft, site: Site, fmt: str, rows: Float, held_rows: Float, ratios: Sequence[float]
) -> dict[str, tuple[Float, float]]:
    """By layer: the factor on each output channel's step with the least output error, and its gain in dB.

    Only layers whose output is better on `held_rows` too. Only the weight is rounded in the comparison.
    """
    weights = weights_of(draft, site)
    reference, held = Reference(rows, weights), Reference(held_rows, weights)
    found = {}
    for number, (taker, weight) in enumerate(zip(site.takers, weights, strict=True)):
        chosen = _best(reference, number, weight, fmt, (1.0, *ratios))
        before = held.noise_of(number, held.rows @ rounded_channels(weight, fmt))
        after = held.noise_of(number, held.rows @ rounded_channels(weight, fmt, chosen))
        if after < before:
            found[taker.layer] = chosen, gain_db(before, after)
    return found


def _best(reference: Reference, number: int, weight: Float, fmt: str, ratios: Sequence[float]) -> Float:
    """For each column, the ratio with the least error over the rows; of equal ones the first."""
    alike = reference.row_weights(number)[:, None] ** 2
    errors = []
    for ratio in ratios:
        error = np.square(reference.rows @ (rounded_channels(weight, fmt, ratio) - weight), dtype=np.float64)
        errors.append(error.sum(axis=0) * (error * alike).sum(axis=0))
    return np.asarray(np.take(np.asarray(ratios, np.float32), np.argmin(errors, axis=0)))
