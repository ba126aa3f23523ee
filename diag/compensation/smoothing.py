"""SmoothQuant: scale moved from activations into weights by channel (Xiao et al. 2023, arXiv 2211.10438)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diag.compensation.draft import Draft
from diag.compensation.edit import Rewrite
from diag.compensation.layer_error import Reference, Rounding, gain_db
from diag.compensation.sites import Site

Float = NDArray[np.float32]
_MOST_EXPONENT = 12


@dataclass(frozen=True)
class Smoothing:
    """Factors for a site's channels, and what they bring."""

    site: Site
    factors: Float
    """Each channel is divided by its factor: powers of two, so that FP32 loses nothing."""
    alpha: float
    gains_db: dict[str, float]
    """By layer, on held-out rows."""


def weights_of(draft: Draft, site: Site) -> list[Float]:
    """Weights of the site's layers, each of shape (channels, outputs)."""
    rewrite = draft.model
    found = []
    for taker in site.takers:
        weight = rewrite.constant(rewrite.layer_by_id[taker.layer].inputs[taker.weight])
        assert weight is not None
        values = np.asarray(weight, np.float32)
        found.append(np.ascontiguousarray(values if taker.axis == 0 else values.T))
    return found


def search_smoothing(
    draft: Draft, site: Site, fmt: str, rows: Float, held_rows: Float, alphas: Sequence[float]
) -> Smoothing | None:
    """The strength with the least output error on `rows`; None when none is better on `held_rows`."""
    weights = weights_of(draft, site)
    absmax = draft.channel_absmax(site.tensor, rows)
    clip = draft.limit(site.tensor) / max(float(absmax.max()), 1e-30)
    reference = Reference(rows, weights)
    costs: list[tuple[float, float, Float]] = []
    for alpha in alphas:
        factors = migration(absmax, weights, alpha, site.ties)
        rounding = _rounding(fmt, absmax, factors, clip, len(weights))
        costs.append((_cost(reference, weights, factors, rounding), alpha, factors))
    _, alpha, factors = min(costs, key=lambda found: found[0])
    held = Reference(held_rows, weights)
    plain = Rounding(fmt, clip * float(absmax.max()), (None,) * len(weights))
    before = _noise(held, weights, np.ones_like(factors), plain)
    after = _noise(held, weights, factors, _rounding(fmt, absmax, factors, clip, len(weights)))
    if not sum(after) < sum(before):
        return None
    gains = [gain_db(*pair) for pair in zip(before, after, strict=True)]
    return Smoothing(site, factors, alpha, {t.layer: g for t, g in zip(site.takers, gains, strict=True)})


def migration(
    absmax: Float, weights: Sequence[Float], alpha: float, ties: NDArray[np.intp] | None = None
) -> Float:
    """Factors max|x|^alpha / max|w|^(1 - alpha) of each channel, as powers of two around 1.

    Their median is 1: a common factor changes no quantizer. Channels without activation or without
    weight keep 1. `ties`: class of each channel; a class gets one factor, from its largest values.
    """
    largest = np.maximum.reduce([np.abs(weight).max(axis=1) for weight in weights])
    x, w = np.asarray(absmax, np.float64), largest.astype(np.float64)
    if ties is not None:
        x, w = _by_class(x, ties), _by_class(w, ties)
    alive = (x > 0) & (w > 0)
    if not alive.any():
        return np.ones(len(absmax), np.float32)
    exponents = np.zeros(len(absmax))
    exponents[alive] = alpha * np.log2(x[alive]) - (1 - alpha) * np.log2(w[alive])
    exponents[alive] -= np.median(exponents[alive])  # most channels then keep their values
    bounded = np.clip(np.rint(exponents), -_MOST_EXPONENT, _MOST_EXPONENT)
    return np.asarray(np.exp2(bounded), np.float32)


def _by_class(values: NDArray[np.float64], ties: NDArray[np.intp]) -> NDArray[np.float64]:
    largest = np.zeros(int(ties.max()) + 1)
    np.maximum.at(largest, ties, values)
    return np.asarray(largest[ties])


def apply_scale(rewrite: Rewrite, site: Site, factors: Float, into_weights: bool = True) -> str:
    """Divide a site's channels by `factors` and multiply its weights; the tensor its layers read then."""
    readers = [taker.layer for taker in site.takers]
    tensor = site.tensor
    for giver in site.givers:
        values = rewrite.constant(giver.layer, giver.input)
        shared = factors if site.ties is None else _one_of_each(factors, site.ties)
        vector = along(shared, max(values.ndim, 1), giver.axis)
        rewrite.put(giver.layer, giver.input, values * vector if giver.divides else values / vector)
    if not site.folds:
        constant = rewrite.add(f"trtdiag/smooth/{tensor}/factors", (1 / factors).astype(np.float32))
        tensor = rewrite.insert("Mul", "smooth", [tensor, constant], readers)
    for taker in site.takers if into_weights else ():
        weight = rewrite.constant(taker.layer, taker.weight)
        rewrite.put(taker.layer, taker.weight, weight * along(factors, 2, taker.axis))
    return tensor


def _one_of_each(factors: Float, ties: NDArray[np.intp]) -> Float:
    found = np.ones(int(ties.max()) + 1, np.float32)
    found[ties] = factors
    return found


def along(vector: Float, rank: int, axis: int) -> Float:
    """A vector shaped to broadcast along one axis of a tensor."""
    shape = [1] * rank
    shape[axis] = -1
    return vector.reshape(shape)


def _rounding(fmt: str, absmax: Float, factors: Float, clip: float, weights: int) -> Rounding:
    return Rounding(fmt, clip * float((absmax / factors).max()), (None,) * weights)


def _noise(reference: Reference, weights: Sequence[Float], factors: Float, rounding: Rounding) -> list[float]:
    scaled = [rounding.weight(i, weight * factors[:, None]) for i, weight in enumerate(weights)]
    return reference.noise(rounding.activation(reference.rows / factors), scaled)


def _cost(reference: Reference, weights: Sequence[Float], factors: Float, rounding: Rounding) -> float:
    return sum(_noise(reference, weights, factors, rounding))
