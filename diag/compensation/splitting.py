"""Outlier channels in two halves: the largest channels of an activation are read twice, each time as half.

Zhao et al. 2019, "Improving Neural Network Quantization without Retraining using Outlier Channel Splitting"
(arXiv 1901.09504), on activations. Halving is exact in FP32, and so is the sum of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.compensation.draft import Draft
from diag.compensation.edit import Rewrite
from diag.compensation.layer_error import Reference, Rounding, gain_db
from diag.compensation.sites import Site
from diag.compensation.smoothing import apply_scale, weights_of

Float = NDArray[np.float32]
_WIDEST_ALIGNMENT = 16
"""INT8 kernels want widths that are a multiple of 16; a split leaves as much of that as there was."""


@dataclass(frozen=True)
class Split:
    """The channels of a site that are doubled, and what it brings."""

    site: Site
    channels: NDArray[np.intp]
    gains_db: dict[str, float]
    """By layer, on held-out rows."""


def search_split(
    draft: Draft, site: Site, fmt: str, rows: Float, held_rows: Float, most: float
) -> Split | None:
    """The number of channels with the least output error on `rows`; None when it is no gain on `held_rows`.

    `most`: largest share of the channels. Sites whose channels are tied are left alone.
    """
    counts = split_counts(site.channels, most) if site.ties is None else ()
    if not counts:
        return None
    weights = weights_of(draft, site)
    absmax = draft.channel_absmax(site.tensor, rows)
    order = np.argsort(-absmax, kind="stable")
    reference, held = Reference(rows, weights), Reference(held_rows, weights)
    clip = draft.limit(site.tensor) / max(float(absmax.max()), 1e-30)

    def noise(of: Reference, count: int) -> list[float]:
        factors = np.ones(site.channels, np.float32)
        factors[order[:count]] = 2
        rounding = Rounding(fmt, clip * float((absmax / factors).max()), (None,) * len(weights))
        passed = rounding.activation(of.rows / factors) * factors
        return of.noise(passed, [rounding.weight(i, weight) for i, weight in enumerate(weights)])

    best = min(counts, key=lambda count: sum(noise(reference, count)))
    before, after = noise(held, 0), noise(held, best)
    if not sum(after) < sum(before):
        return None
    gains = [gain_db(*pair) for pair in zip(before, after, strict=True)]
    by_layer = {taker.layer: gain for taker, gain in zip(site.takers, gains, strict=True)}
    return Split(site, np.sort(order[:best]), by_layer)


def split_counts(channels: int, most: float) -> tuple[int, ...]:
    """Numbers of channels to try: 1, 2 and 4 times the alignment that the width has, up to `most` of it."""
    alignment = max(1, min(channels & -channels, _WIDEST_ALIGNMENT))
    return tuple(n * alignment for n in (1, 2, 4) if n * alignment <= most * channels)


def apply_split(rewrite: Rewrite, found: Split) -> str:
    """Halve the channels, read them twice, and give their rows of the weights twice; the tensor read then."""
    site, doubled = found.site, found.channels
    factors = np.ones(site.channels, np.float32)
    factors[doubled] = 2
    tensor = apply_scale(rewrite, site, factors, into_weights=False)
    indices = np.concatenate([np.arange(site.channels), doubled]).astype(np.int64)
    constant = rewrite.add(f"trtdiag/split/{site.tensor}/channels", indices)
    readers = [taker.layer for taker in site.takers]
    for taker in site.takers:
        weight = rewrite.constant(taker.layer, taker.weight)
        rewrite.put(taker.layer, taker.weight, np.take(weight, indices, axis=taker.axis))
    return rewrite.insert("Gather", "split", [tensor, constant], readers, axis=-1)
