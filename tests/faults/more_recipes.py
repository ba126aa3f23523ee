"""Recipes of the fault catalogue that the fixtures do not have."""

from __future__ import annotations

import numpy as np

from fixtures.graphs.parts import reduce_mean
from fixtures.graphs.sketch import Array, Recipe, Sketch


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0.0, scale, shape)


def instance_norm() -> Recipe:
    """R1 as InstanceNorm over 64 x 64 values of deviation 150: squares reach 2e5."""
    s = Sketch("R1-instance")
    x = s.input("x", normal(1, 4, 64, 64, scale=150.0))
    mean = s.op("ReduceMean", x, axes=[2, 3], keepdims=1)
    centred = s.op("Sub", x, mean)
    square = s.blame(s.op("Pow", centred, s.const(2.0)))
    shifted = s.op("Add", s.op("ReduceMean", square, axes=[2, 3], keepdims=1), s.const(1e-5))
    return s.done(s.op("Div", centred, s.op("Sqrt", shifted)), "norm-square-overflow", "InstanceNorm")


def timesteps() -> Recipe:
    """R7: sine and cosine of a timestep times frequencies from 1 to 1e-4."""
    s = Sketch("R7")
    t = s.input("t", np.array([[998.39], [988.49], [937.5], [3.2]]))
    frequencies = 10000.0 ** (-np.arange(32) / 32)
    angle = s.blame(s.op("Mul", t, s.const(frequencies)))
    y = s.op("Concat", s.op("Sin", angle), s.op("Cos", angle), axis=-1)
    return s.done(y, "position-precision", "timestep embedding")


def log_of_max() -> Recipe:
    """R12: log(max(x, 1e-9)); the bound is 0 in FP16."""
    s = Sketch("R12")
    bounded = s.blame(s.op("Max", s.input("x", np.array([0.0, 1e-10, 1e-3, 1.0])), s.const(1e-9)))
    return s.done(s.op("Log", bounded), "small-constant", "log of a bounded value")


def inverse_sigmoid() -> Recipe:
    """R13: log(max(p, 1e-5) / max(1 - p, 1e-5)): near 1 the quotient leaves FP16."""
    s = Sketch("R13")
    p = s.op(
        "Clip", s.input("p", np.array([0.5, 0.9, 0.99, 0.999, 0.9997, 0.99999])), s.const(0.0), s.const(1.0)
    )
    up = s.op("Clip", p, s.const(1e-5))
    down = s.op("Clip", s.op("Sub", s.const(1.0), p), s.const(1e-5))
    quotient = s.blame(s.op("Div", up, down))
    return s.done(s.op("Log", quotient), "activation-overflow", "inverse sigmoid")


def log_of_rest() -> Recipe:
    """R13b: log(1 - clip(p, 1e-6, 1 - 1e-6)) at p = 1: the upper bound is 1 in FP16."""
    s = Sketch("R13b")
    p = s.input("p", np.array([0.2, 0.5, 0.9, 1.0]))
    clipped = s.blame(s.op("Clip", p, s.const(1e-6), s.const(1 - 1e-6)))
    return s.done(s.op("Log", s.op("Sub", s.const(1.0), clipped)), "small-constant", "log of the rest")


def absorbed_residuals(updates: int = 32) -> Recipe:
    """A residual stream of 300 and updates of deviation 0.5: in BF16 its spacing is 2. y is the change."""
    s = Sketch("residual")
    start = s.input("x", np.full((4, 64), 300.0))
    stream = start
    for number in range(updates):
        stream = s.op("Add", stream, s.const(normal(64, scale=0.5, seed=number)))
    return s.done(s.op("Sub", stream, start), "cancellation", "residual absorption")


def subnormal_weights() -> Recipe:
    """A third of the weights is subnormal in FP16: harmless, the others carry the energy."""
    s = Sketch("subnormal")
    weights = normal(64, 64, scale=0.1)
    tiny = np.random.default_rng(1).random((64, 64)) < 0.3
    weights[tiny] = normal(64, 64, scale=1e-6, seed=2)[tiny]
    return s.done(s.op("MatMul", s.input("x", normal(8, 64)), s.const(weights)), "", "subnormal weights")


def close_scores() -> Recipe:
    """R30: scores between 0.20 and 0.21; their order is fragile, they themselves are right."""
    s = Sketch("R30")
    values = np.random.default_rng(0).uniform(0.20, 0.21, (1, 8400))
    return s.done(s.op("Mul", s.input("x", values), s.const(1.0)), "", "close scores")


def folded_scale() -> Recipe:
    """R42: gamma / sqrt(var + eps) with a variance of 1e-6, folded in half: about 1e-3."""
    s = Sketch("R42")
    x = s.input("x", normal(4, 64, scale=0.01))
    shifted = s.op("Add", s.const(np.full(64, 1e-6)), s.const(1e-5))
    scale = s.op("Div", s.const(np.abs(normal(64)) + 0.5), s.op("Sqrt", shifted))
    return s.done(s.op("Mul", x, scale), "", "scale folded in half")


def cancelling_counts() -> Recipe:
    """1001 - 999 and 1000.3 - 1000.1: nothing is left of either in BF16."""
    s = Sketch("R31")
    a, b = s.input("a", np.array([1001.0, 1000.3])), s.input("b", np.array([999.0, 1000.1]))
    return s.done(s.blame(s.op("Sub", a, b)), "cancellation", "difference of near-equal numbers")


def near_the_limit() -> Recipe:
    """B17: a product just beyond the largest half."""
    s = Sketch("B17")
    return s.done(
        s.blame(s.op("Mul", s.input("x", np.array([65535.0, 1.0, 2.0])), s.const(1.0))),
        "activation-overflow",
        "65535",
    )


def norm_of_rms() -> Recipe:
    """R2 behind a residual Add of magnitude 3e4 (B11): the Add fits, its square does not."""
    s = Sketch("B11")
    x = s.op("Add", s.input("x", normal(2, 64, scale=1e4)), s.input("r", normal(2, 64, scale=1e4, seed=1)))
    square = s.blame(s.op("Mul", x, x))
    shifted = s.op("Add", reduce_mean(s.builder, square, ""), s.const(1e-5))
    return s.done(
        s.op("Mul", x, s.op("Reciprocal", s.op("Sqrt", shifted))), "norm-square-overflow", "RMSNorm"
    )
