"""Metrics from accumulated sums. Names, units and directions are in `diag.numerics.table.METRICS`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from diag.numerics.distributions import DecisionSums
from diag.numerics.error import ErrorSums

_DEAD_CHANNEL = 1e-12
"""A channel with less than this share of the tensor's energy has no SQNR of its own."""


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise): inf without noise, -inf with noise and no signal."""
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def sqnr_db(sums: ErrorSums) -> float:
    """SQNR over all elements, in dB. -inf as soon as one element is not finite where the reference is."""
    if sums.nonfinite:
        return -math.inf
    return decibel(float(sums.reference_square.sum()), float(sums.error_square.sum()))


def channel_sqnr_db(sums: ErrorSums) -> NDArray[np.float64]:
    """SQNR of each channel in dB; inf for channels that carry no energy in the reference."""
    signal, noise = sums.reference_square, sums.error_square
    alive = (signal > _DEAD_CHANNEL * signal.sum()) & (noise > 0)
    ratio = np.divide(signal, noise, out=np.full(signal.shape, np.inf), where=alive)
    return np.asarray(10 * np.log10(ratio))


def error_metrics(sums: ErrorSums) -> dict[str, float]:
    """All metrics of one tensor against its reference.

    Where the candidate is not finite, SQNR is -inf, relative L2 inf and cosine NaN, so that no threshold
    can pass; the other numbers speak of the elements that could be compared.
    """
    signal, noise = float(sums.reference_square.sum()), float(sums.error_square.sum())
    broken = sums.nonfinite > 0
    compared = max(sums.elements - sums.nonfinite - sums.nonfinite_reference - sums.masked, 1)
    return {
        "sqnr_db": sqnr_db(sums),
        "rel_l2": math.inf if broken else _ratio(math.sqrt(noise), math.sqrt(signal)),
        "cosine": math.nan if broken else _cosine(signal, noise, sums.cross),
        "max_abs": math.inf if broken else sums.max_abs,
        "mean_error": sums.error_sum / compared,
        "channel_min_sqnr_db": -math.inf if broken else float(channel_sqnr_db(sums).min()),
        "nonfinite": float(sums.nonfinite),
        "zero_collapsed_rows": float(sums.zero_collapsed_rows),
        "elements": float(sums.elements),
        "reference_rms": math.sqrt(signal / compared),
        "reference_absmax": sums.reference_absmax,
    }


def identical_metrics() -> dict[str, float]:
    """Metrics of a tensor that is the reference itself, bit for bit."""
    return {
        "sqnr_db": math.inf,
        "rel_l2": 0.0,
        "cosine": 1.0,
        "max_abs": 0.0,
        "mean_error": 0.0,
        "nonfinite": 0.0,
    }


def decision_metrics(sums: DecisionSums, decides: bool) -> dict[str, float]:
    """Mean KL divergence in nats; with `decides`, agreement of the argmax too."""
    rows = max(sums.rows, 1)
    metrics = {"kl": sums.kl_sum / rows}
    if decides:
        metrics |= {"top1": sums.same_top1 / rows, "flips": float(sums.flips)}
    return metrics


def _ratio(error: float, reference: float) -> float:
    if error == 0:
        return 0.0
    return error / reference if reference > 0 else math.inf


def _cosine(signal: float, noise: float, cross: float) -> float:
    """Cosine from |r|^2, |e|^2 and r.e, with candidate c = r + e: 1 when both are zero."""
    candidate = signal + 2 * cross + noise
    if noise == 0:
        return 1.0
    if signal <= 0 or candidate <= 0:
        return 0.0
    return float(np.clip((signal + cross) / math.sqrt(signal * candidate), -1.0, 1.0))
