"""Sums taken by torch against the definitions in NumPy's float64; here on the CPU, in tests/gpu on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from diag.engines.on_device import DeviceMeters
from diag.numerics.measured import Measured, TensorKind

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SHAPES = [(), (7,), (3, 5), (2, 6, 8), (2, 3, 4, 5)]


def measured(reference: Any, candidate: Any, kind: TensorKind) -> Measured:
    meters = DeviceMeters(torch, [(candidate, kind)])
    assert meters.are_of([(candidate, kind)])
    assert not meters.are_of([(candidate.clone(), kind)])
    meters.bring([reference])
    meters.start()
    return meters.results()[0]


def pair(shape: tuple[int, ...], seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    reference = np.asarray(rng.standard_normal(shape), np.float32)
    return reference, np.asarray(reference + 0.1 * rng.standard_normal(shape), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_sums_are_the_definitions(shape: tuple[int, ...], dtype: str) -> None:
    reference, other = pair(shape)
    candidate = torch.from_numpy(other).to(getattr(torch, dtype))
    sums = measured(reference, candidate, TensorKind()).sums
    ref = reference.astype(np.float64)
    error = candidate.double().numpy() - ref
    assert sums.reference_square.sum() == pytest.approx(np.sum(ref**2), rel=1e-6)
    assert sums.error_square.sum() == pytest.approx(np.sum(error**2), rel=1e-5)
    assert sums.cross == pytest.approx(np.sum(ref * error), abs=1e-5)
    assert sums.error_sum == pytest.approx(np.sum(error), abs=1e-5)
    assert sums.max_abs == pytest.approx(np.abs(error).max(), rel=1e-5)
    assert sums.max_abs_index == np.abs(error).argmax()
    assert sums.reference_absmax == np.abs(ref).max()
    assert (sums.elements, sums.nonfinite) == (reference.size, 0)


@pytest.mark.parametrize(
    ("shape", "convolution", "axis"), [((3, 5), False, 1), ((2, 6, 8), False, 2), ((2, 6, 8), True, 1)]
)
def test_each_channel_has_its_sum(shape: tuple[int, ...], convolution: bool, axis: int) -> None:
    reference, other = pair(shape)
    sums = measured(reference, torch.from_numpy(other), TensorKind(convolution=convolution)).sums
    others = tuple(d for d in range(len(shape)) if d != axis)
    error = other.astype(np.float64) - reference
    assert sums.reference_square == pytest.approx((reference.astype(np.float64) ** 2).sum(others), rel=1e-6)
    assert sums.error_square == pytest.approx((error**2).sum(others), rel=1e-5)


def test_logits_are_judged_by_their_softmax() -> None:
    reference, candidate = pair((4, 6, 9))
    noise = 0.05
    found = measured(reference, torch.from_numpy(candidate), TensorKind("logits", noise=noise)).decisions
    ref, cand = (a.reshape(-1, 9).astype(np.float64) for a in (reference, candidate))
    p, log_p, log_q = softmax(ref, axis=1), log_softmax(ref, axis=1), log_softmax(cand, axis=1)
    same = ref.argmax(1) == cand.argmax(1)
    top = np.sort(ref, axis=1)
    decided = top[:, -1] - top[:, -2] > 2 * noise
    assert found.kl_sum == pytest.approx(np.sum(p * (log_p - log_q)), rel=1e-6)
    assert (found.rows, found.same_top1, found.flips) == (24, same.sum(), (~same & decided).sum())


def test_probabilities_are_taken_as_they_are() -> None:
    reference, candidate = (softmax(a, axis=-1) for a in pair((4, 6, 9)))
    found = measured(reference, torch.from_numpy(candidate), TensorKind("probabilities")).decisions
    ref, cand = reference.astype(np.float64), candidate.astype(np.float64)
    assert found.kl_sum == pytest.approx(np.sum(ref * np.log(ref / cand)), rel=1e-6)
    assert found.rows == 24


def test_class_probabilities_decide_too() -> None:
    reference, candidate = (softmax(a, axis=-1) for a in pair((4, 6, 9)))
    found = measured(reference, torch.from_numpy(candidate), TensorKind("classes", noise=0.01)).decisions
    ref, cand = (a.reshape(-1, 9).astype(np.float64) for a in (reference, candidate))
    same, top = ref.argmax(1) == cand.argmax(1), np.sort(ref, axis=1)
    assert found.kl_sum == pytest.approx(np.sum(ref * np.log(ref / cand)), rel=1e-6)
    assert (found.rows, found.same_top1) == (24, same.sum())
    assert found.flips == (~same & (top[:, -1] - top[:, -2] > 0.02)).sum()


@pytest.mark.parametrize("kind", [TensorKind(), TensorKind("logits")])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_counted_as_on_the_host(kind: TensorKind, value: float) -> None:
    reference, candidate = pair((4, 8))
    candidate[1, 2] = value
    found = measured(reference, torch.from_numpy(candidate), kind)
    assert found.sums.nonfinite == 1
    keep = np.isfinite(candidate)
    error = (candidate - reference)[keep].astype(np.float64)
    assert found.sums.error_square.sum() == pytest.approx(np.sum(error**2), rel=1e-5)


def test_lost_rows_and_masks_are_found() -> None:
    reference, candidate = pair((4, 8))
    candidate[2] = 0
    assert measured(reference, torch.from_numpy(candidate), TensorKind()).sums.lost_rows == 1
    reference, candidate = pair((4, 8))
    reference[0, 0] = candidate[0, 0] = -3e38
    sums = measured(reference, torch.from_numpy(candidate), TensorKind()).sums
    assert (sums.masked, sums.lost_rows) == (1, 0)
    assert sums.reference_absmax < 10
