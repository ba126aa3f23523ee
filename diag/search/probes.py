"""What a small error at an output costs, as the mean square of its products with random vectors.

Every damage that targets count is, for small errors e, a quadratic form e'He. With H = AA' and independent
random signs z, the mean of ((Az).e)^2 is e'He (Hutchinson's estimator, 1990), so one backward pass from Az
says what the errors of all layers cost, each alone. Pure functions of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diag.numerics.error import MASK_LIKE
from diag.numerics.measured import Kind
from diag.numerics.metrics import decibel

Quantity = Literal["noise", "cosine", "kl"]

QUANTITIES: dict[str, Quantity] = {
    "sqnr_db": "noise",
    "rel_l2": "noise",
    "cosine": "cosine",
    "kl": "kl",
    "top1": "kl",
}
"""Metric of a target to what is estimated for it."""

_LEAST_PROBABILITY = 1e-6
"""Below it the quadratic form of KL says nothing: an error is larger than the probability."""


def probe(
    quantity: Quantity, kind: Kind, reference: NDArray[Any], signs: NDArray[Any]
) -> NDArray[np.float32]:
    """The random vector Az of one output's shape; `signs` is z, of +1 and -1, of the same shape.

    The mean of ((Az).e)^2 over z is, to second order in e: for `noise` |e|^2 / |y|^2; for `cosine` 1 less the
    cosine; for `kl` the mean over rows (last axis) of KL(y || y + e) in nats, of logits or, by `kind`, of
    probabilities.
    """
    usable = np.abs(reference) < MASK_LIKE
    y = np.where(usable, reference, 0).astype(np.float64)
    z = np.where(usable, signs, 0).astype(np.float64)
    norm = max(float(np.linalg.norm(y.ravel())), 1e-300)
    if quantity == "noise":
        vector = z / norm
    elif quantity == "cosine":
        vector = (z - y * (float(np.vdot(y, z)) / norm**2)) / (norm * math.sqrt(2))
    else:
        vector = _kl(y, z, usable, kind) / math.sqrt(2 * max(y.size // max(y.shape[-1], 1), 1))
    return vector.astype(np.float32)


def _kl(y: NDArray[Any], z: NDArray[Any], usable: NDArray[Any], kind: Kind) -> NDArray[Any]:
    """The square root of KL's curvature: diag(p) - pp' for logits, 1/p for probabilities."""
    if kind in ("probabilities", "classes"):
        return np.asarray(z / np.sqrt(np.maximum(y, _LEAST_PROBABILITY)))
    shifted = np.where(usable, y, -np.inf)
    p = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    root = np.sqrt(p)
    return np.asarray(root * z - p * (root * z).sum(axis=-1, keepdims=True))


def predicted_metrics(costs: Mapping[Quantity, float]) -> dict[str, float]:
    """The metrics of an output whose error costs this much, as `diag.search.target` reads them."""
    metrics: dict[str, float] = {}
    if "noise" in costs:
        metrics |= {"sqnr_db": decibel(1.0, costs["noise"]), "rel_l2": math.sqrt(costs["noise"])}
    if "cosine" in costs:
        metrics["cosine"] = 1 - costs["cosine"]
    if "kl" in costs:  # a target on top-1 counts KL as damage
        metrics |= {"kl": costs["kl"], "top1": math.exp(-costs["kl"])}
    return metrics
