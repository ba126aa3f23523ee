"""Random probes of outputs: their mean square is what a small error costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from diag.gate.threshold import parse_threshold
from diag.search.probes import Quantity, predicted_metrics, probe
from diag.search.target import Target

SHAPE = (2, 4)
Y = np.random.default_rng(3).standard_normal(SHAPE)
E = np.random.default_rng(4).standard_normal(SHAPE) * 1e-3


def mean_square(quantity: Quantity, kind: str, y: np.ndarray, e: np.ndarray) -> float:
    """The mean over every vector of signs there is: no sampling error is left."""
    signs = [np.reshape(s, y.shape) for s in itertools.product((-1.0, 1.0), repeat=y.size)]
    return float(np.mean([np.vdot(probe(quantity, kind, y, z), e) ** 2 for z in signs]))  # type: ignore[arg-type]


def softmax(y: np.ndarray) -> np.ndarray:
    return np.exp(y) / np.exp(y).sum(axis=-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum(axis=-1).mean())


def test_noise_is_noise_over_signal() -> None:
    assert mean_square("noise", "values", Y, E) == pytest.approx((E**2).sum() / (Y**2).sum(), rel=1e-5)


def test_cosine_is_what_the_cosine_lacks() -> None:
    other = Y + E
    cosine = np.vdot(Y, other) / np.linalg.norm(Y) / np.linalg.norm(other)
    assert mean_square("cosine", "values", Y, E) == pytest.approx(1 - cosine, rel=5e-3)


def test_an_error_along_the_output_costs_no_cosine() -> None:
    assert mean_square("cosine", "values", Y, 0.01 * Y) < 1e-12


def test_kl_of_logits() -> None:
    assert mean_square("kl", "logits", Y, E) == pytest.approx(kl(softmax(Y), softmax(Y + E)), rel=5e-3)


def test_a_common_shift_of_logits_costs_nothing() -> None:
    assert mean_square("kl", "logits", Y, np.full(SHAPE, 0.1)) < 1e-12


def test_kl_of_probabilities() -> None:
    p = softmax(Y)
    e = p * (E - (p * E).sum(axis=-1, keepdims=True))  # the change of a softmax: its rows sum to nothing
    assert mean_square("kl", "classes", p, e) == pytest.approx(kl(p, p + e), rel=5e-3)


def test_masks_carry_no_weight() -> None:
    y = Y.copy()
    y[0, 0] = -3.4e38
    seen = (E**2).sum() - E[0, 0] ** 2
    assert mean_square("noise", "values", y, E) == pytest.approx(seen / (Y**2).sum() * _share(y), rel=1e-5)
    assert np.isfinite(mean_square("kl", "logits", y, E))


def _share(y: np.ndarray) -> float:
    """Energy of Y over that of the elements of `y` that are no masks."""
    return float((Y**2).sum() / (y[np.abs(y) < 1e30] ** 2).sum())


@pytest.mark.parametrize(
    ("target", "costs"),
    [("sqnr_db>=20", {"noise": 0.02}), ("rel_l2<=0.1", {"noise": 0.02}), ("cosine>=0.99", {"cosine": 0.02}),
     ("kl<=0.5", {"kl": 1.0})],
)  # fmt: skip
def test_a_target_reads_twice_what_it_allows_as_a_damage_of_two(
    target: str, costs: dict[Quantity, float]
) -> None:
    bound = parse_threshold(target)
    assert Target((bound,)).damage({"y": predicted_metrics(costs)}) == pytest.approx(2.0)


def test_a_target_on_top1_counts_kl() -> None:
    bound = parse_threshold("top1>=0.99")
    assert Target((bound,)).damage({"y": predicted_metrics({"kl": 0.25})}) == pytest.approx(0.25)
