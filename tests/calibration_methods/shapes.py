"""Distributions that calibration meets, and some made to mislead it."""

from __future__ import annotations

import numpy as np


def _draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _one_outlier() -> np.ndarray:
    values = _draw(1).normal(size=4_000)
    values[777] = 300
    return values


def _relu() -> np.ndarray:
    return np.maximum(_draw(2).normal(size=4_000), 0)


def _masked_softmax() -> np.ndarray:
    logits = _draw(3).normal(size=(60, 100)) * 3
    weights = np.exp(logits)
    weights[:, 60:] = 0
    return weights / weights.sum(axis=1, keepdims=True)


def _two_clusters() -> np.ndarray:
    return np.concatenate([_draw(4).normal(0, 0.01, 3_000), _draw(5).normal(8, 0.5, 1_000)])


SHAPES: dict[str, np.ndarray] = {
    name: np.asarray(values, np.float32)
    for name, values in {
        "normal": _draw().normal(size=4_000),
        "uniform": _draw().uniform(-3, 3, 4_000),
        "heavy_tail": _draw().standard_t(2, 4_000),
        "heavier_tail": _draw().standard_cauchy(4_000),
        "one_outlier": _one_outlier(),
        "one_sided": _relu(),
        "softmax": _masked_softmax(),
        "two_clusters": _two_clusters(),
        "all_equal": np.full(1_000, -0.7),
        "power_of_two": np.full(1_000, 2.0),
        "few_values": _draw(6).choice([0.0, 0.5, -1.0, 3.0], 4_000),
        "tiny": _draw(7).normal(size=2_000) * 1e-40,
        "huge": _draw(8).normal(size=2_000) * 1e37,
        "single": np.array([5.0]),
    }.items()
}
