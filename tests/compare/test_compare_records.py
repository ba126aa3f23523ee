"""Records against plain NumPy in float64; a comparison that was saved goes on as if it never stopped."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from diag.compare.comparison import Comparison, Observed
from diag.compare.record import Record
from diag.numerics.measured import TensorKind

RNG = np.random.default_rng(7)


def batches(count=5, shape=(3, 4, 8), scale=0.1):
    for _ in range(count):
        reference = RNG.normal(0, 1, shape).astype(np.float32)
        yield reference, reference + RNG.normal(0, scale, shape).astype(np.float32)


def metrics_of(pairs, **kind):
    record = Record(**kind)
    for number, (reference, candidate) in enumerate(pairs):
        record.update(number, reference, candidate)
    return record


def decibel(signal, noise):
    return 10 * math.log10(signal / noise)


def test_values_against_numpy():
    pairs = list(batches())
    ref = np.concatenate([r for r, _ in pairs]).astype(np.float64)
    err = np.concatenate([c for _, c in pairs]).astype(np.float64) - ref
    record = metrics_of(pairs)
    got = record.metrics()
    assert got["sqnr_db"] == pytest.approx(decibel((ref**2).sum(), (err**2).sum()), abs=1e-4)
    assert got["rel_l2"] == pytest.approx(np.linalg.norm(err) / np.linalg.norm(ref), rel=1e-5)
    flat, cand = ref.reshape(-1), (ref + err).reshape(-1)
    assert got["cosine"] == pytest.approx(flat @ cand / np.linalg.norm(flat) / np.linalg.norm(cand), abs=1e-7)
    assert got["max_abs"] == pytest.approx(np.abs(err).max(), rel=1e-6)
    assert got["mean_error"] == pytest.approx(err.mean(), abs=1e-7)
    assert got["elements"] == ref.size
    per_channel = 10 * np.log10((ref**2).sum((0, 1)) / (err**2).sum((0, 1)))
    assert got["channel_min_sqnr_db"] == pytest.approx(per_channel.min(), abs=1e-4)
    assert record.worst_channel() == per_channel.argmin()
    per_batch = [decibel((r.astype(float) ** 2).sum(), ((c - r).astype(float) ** 2).sum()) for r, c in pairs]
    assert got["worst_batch_sqnr_db"] == pytest.approx(min(per_batch), abs=1e-4)
    assert record.worst_batch == int(np.argmin(per_batch))
    reference, candidate = pairs[record.worst_batch]
    place = np.unravel_index(np.abs(candidate - reference).argmax(), reference.shape)
    assert record.worst_index == tuple(map(int, place))


def test_a_batch_of_its_own_shape_is_taken_in():
    """Sequence lengths may differ from batch to batch."""
    pairs = [*batches(2, (2, 5, 8)), *batches(2, (2, 9, 8))]
    ref = np.concatenate([r.reshape(-1, 8) for r, _ in pairs]).astype(np.float64)
    err = np.concatenate([(c - r).reshape(-1, 8) for r, c in pairs]).astype(np.float64)
    got = metrics_of(pairs).metrics()
    assert got["sqnr_db"] == pytest.approx(decibel((ref**2).sum(), (err**2).sum()), abs=1e-4)
    assert got["elements"] == ref.size


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_broken_element_breaks_the_tensor(bad):
    pairs = list(batches(3))
    pairs[1][1][2, 3, 4] = bad
    record = metrics_of(pairs)
    got = record.metrics()
    assert got["nonfinite"] == 1
    assert got["sqnr_db"] == got["worst_batch_sqnr_db"] == -math.inf
    assert record.worst_batch == 1


def test_probabilities_and_logits_get_their_own_metrics():
    logits = RNG.normal(0, 3, (2, 6, 10)).astype(np.float32)
    noisy = logits + RNG.normal(0, 0.5, logits.shape).astype(np.float32)

    def softmax(x):
        e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(logits), softmax(noisy)
    kl = (p * np.log(p / q)).sum(-1).mean()
    top1 = (p.argmax(-1) == q.argmax(-1)).mean()
    as_logits = metrics_of([(logits, noisy)], kind="logits").metrics()
    assert as_logits["kl"] == pytest.approx(kl, rel=1e-4)
    assert as_logits["top1"] == pytest.approx(top1)
    as_p = metrics_of([(p.astype(np.float32), q.astype(np.float32))], kind="probabilities").metrics()
    assert as_p["kl"] == pytest.approx(kl, rel=1e-4)
    assert "top1" not in as_p
    assert "kl" not in metrics_of([(logits, noisy)]).metrics()


def test_a_flip_within_the_noise_is_none():
    reference = np.array([[1.0, 1.001], [1.0, 2.0]], np.float32)
    candidate = reference[:, ::-1].copy()
    assert metrics_of([(reference, candidate)], kind="logits", noise=0.01).metrics()["flips"] == 1
    assert metrics_of([(reference, candidate)], kind="logits").metrics()["flips"] == 2


# A comparison, kept and taken up again.


def observations(number):
    """What one batch shows: every way in which a tensor may be observed."""
    rng = np.random.default_rng((3, number))
    wide = rng.normal(0, 1, (2, 7, 16)).astype(np.float32)
    noisy = wide + rng.normal(0, 0.2, wide.shape).astype(np.float32)
    better = wide + rng.normal(0, 0.01, wide.shape).astype(np.float32)
    broken = noisy.copy()
    broken[0, 0, number] = np.inf
    zero = np.zeros_like(wide)
    yield Observed("values", wide, noisy, better)
    yield Observed("broken", wide, broken, better)
    yield Observed("logits", wide, noisy, None)
    yield Observed("only local", wide, None, better)
    yield Observed("both", wide, noisy, noisy)
    yield Observed("equal but apart", wide, noisy, noisy.copy())
    yield Observed("of zero", zero, noisy, zero.copy())
    yield Observed("scalar", np.float32(2), np.float32(2.5), None)
    yield Observed("empty", wide[:0], noisy[:0], None)


def compared(numbers, into=None):
    comparison = into or Comparison({"logits": TensorKind("logits", noise=0.01)})
    for number in numbers:
        for seen in observations(number):
            comparison.observe(number, seen)
        comparison.batches += 1
        comparison.samples += 2
    return comparison


def facts(comparison):
    """Everything that a report is made from, as text (NaN equals NaN there)."""
    return json.dumps(
        {
            "accumulated": {n: told(r) for n, r in comparison.accumulated.items()},
            "local": {n: told(r) for n, r in comparison.local.items()},
            "counts": (comparison.batches, comparison.samples),
        },
        sort_keys=True,
    )


def told(record):
    return [record.metrics(), record.worst_batch, list(record.worst_index), record.worst_channel()]


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 6])
def test_going_on_after_a_stop_changes_nothing(tmp_path, stop):
    whole = compared(range(6))
    compared(range(stop)).save(tmp_path / "state", "key")
    again = Comparison({"logits": TensorKind("logits", noise=0.01)})
    assert again.load(tmp_path / "state", "key")
    assert again.batches == stop
    assert facts(compared(range(stop, 6), again)) == facts(whole)


def test_saving_a_state_that_was_loaded(tmp_path):
    compared(range(2)).save(tmp_path / "state", "key")
    for number in range(2, 5):
        again = Comparison({"logits": TensorKind("logits", noise=0.01)})
        assert again.load(tmp_path / "state", "key")
        compared([number], again).save(tmp_path / "state", "key")
    assert again.load(tmp_path / "state", "key")
    assert facts(again) == facts(compared(range(5)))


def test_the_state_of_another_run_is_not_taken_up(tmp_path):
    compared(range(2)).save(tmp_path / "state", "key")
    again = Comparison()
    assert not again.load(tmp_path / "state", "other")
    assert (again.batches, again.accumulated, again.local) == (0, {}, {})


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_damaged_state_is_none(tmp_path, share):
    compared(range(2)).save(tmp_path / "state", "key")
    whole = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(whole[: int(len(whole) * share)])
    assert not Comparison().load(tmp_path / "state", "key")


def test_no_state_is_none(tmp_path):
    assert not Comparison().load(tmp_path / "state", "key")


def test_memory_does_not_grow_with_the_batches(tmp_path):
    compared(range(2)).save(tmp_path / "two", "key")
    compared(range(9)).save(tmp_path / "nine", "key")
    small, large = ((tmp_path / name).stat().st_size for name in ("two", "nine"))
    assert large < 1.1 * small


def test_tensors_that_equal_the_reference_have_no_record():
    comparison = Comparison()
    comparison.observe(0, Observed("same", np.ones(3, np.float32), None, None))
    assert comparison.accumulated == comparison.local == {}
