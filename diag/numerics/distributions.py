"""Error of distributions: Kullback-Leibler divergence and decisions, for softmax outputs and logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]

_ROWS = 64
"""Rows handled at a time; a row of logits can be 50,000 elements long."""


@dataclass(slots=True)
class DecisionSums:
    """Additive facts about rows that are distributions."""

    kl_sum: float = 0.0
    """Sum over rows of KL(reference || candidate), in nats."""
    rows: int = 0
    same_top1: int = 0
    flips: int = 0
    """Rows with another argmax although the reference's margin exceeds the noise."""

    def add(self, other: DecisionSums) -> None:
        self.kl_sum += other.kl_sum
        self.rows += other.rows
        self.same_top1 += other.same_top1
        self.flips += other.flips


def measure_probabilities(reference: Float, candidate: Float) -> DecisionSums:
    """KL for arrays whose last axis is a distribution already (softmax outputs). Any shape, rank 1 or more.

    Terms with reference 0 are 0; a candidate of 0 (underflow) counts as the smallest float32 subnormal; NaN
    in the candidate gives NaN. Rows whose reference is not finite are left out.
    """
    sums = DecisionSums()
    for ref, cand in _row_blocks(reference, candidate):
        with np.errstate(invalid="ignore"):
            ratio = np.log(np.maximum(ref, _TINY)) - np.log(np.maximum(cand, _TINY))
        sums.kl_sum += float(np.einsum("nc,nc->", ref, ratio))
        sums.rows += len(ref)
    return sums


def measure_logits(reference: Float, candidate: Float, noise: float = 0.0) -> DecisionSums:
    """KL of the softmax distributions, and agreement of the argmax, along the last axis.

    `noise` is the largest absolute difference that the reference shows against itself; a flip counts only
    when the reference's margin (first minus second) is more than twice that. Logits of -inf (masked tokens)
    have probability 0. A row with NaN in the candidate has KL NaN and agrees with nothing; rows whose
    reference has no softmax (NaN, +inf, or -inf throughout) are left out. KL is resolved to about 1e-7.
    """
    sums = DecisionSums()
    for ref, cand in _row_blocks(reference, candidate):
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            sums.kl_sum += _softmax_kl(ref, cand)
        sums.rows += len(ref)
        _count_decisions(sums, ref, cand, noise)
    return sums


def measure_classes(reference: Float, candidate: Float, noise: float = 0.0) -> DecisionSums:
    """KL and agreement of the argmax for class probabilities: a softmax that the model gives out.

    KL as `measure_probabilities`, decisions and `noise` (a difference of probabilities) as `measure_logits`.
    """
    sums = measure_probabilities(reference, candidate)
    for ref, cand in _row_blocks(reference, candidate):
        _count_decisions(sums, ref, cand, noise)
    return sums


def _count_decisions(sums: DecisionSums, ref: Float, cand: Float, noise: float) -> None:
    best, found = ref.argmax(axis=1), cand.argmax(axis=1)  # argmax finds the first NaN, if there is one
    same = (best == found) & ~np.isnan(cand[np.arange(len(cand)), found])
    sums.same_top1 += int(np.count_nonzero(same))
    with np.errstate(invalid="ignore"):
        margin = _margin(ref[~same])  # sorting rows of logits is dear, and few differ
    sums.flips += int(np.count_nonzero(margin > 2 * noise))


def _softmax_kl(ref: Float, cand: Float) -> float:
    """Sum over rows; never negative, as rounding alone would make it for equal rows."""
    log_p, log_q = _log_softmax(ref), _log_softmax(cand)
    p = np.exp(log_p)
    total = float(np.einsum("nc,nc->", p, log_p - log_q))
    if math.isnan(total):  # 0 times infinity: a token without probability counts nothing, unless cand is NaN
        difference = np.where((p == 0) & ~np.isnan(log_q), np.float32(0), log_p - log_q)
        total = float(np.einsum("nc,nc->", p, difference))
    return total if math.isnan(total) else max(total, 0.0)


_TINY = np.float32(1e-45)


def _row_blocks(reference: Float, candidate: Float) -> Iterator[tuple[Float, Float]]:
    """Rows in blocks; those whose reference is no distribution (its largest value not finite) left out."""
    if reference.size == 0:
        return
    ref = reference.reshape(-1, reference.shape[-1])
    cand = candidate.reshape(ref.shape)
    step = max(_ROWS, (1 << 16) // ref.shape[1])
    for start in range(0, len(ref), step):
        rows, others = ref[start : start + step], cand[start : start + step]
        kept = np.isfinite(rows.max(axis=1))
        yield (rows, others) if kept.all() else (rows[kept], others[kept])


def _log_softmax(rows: Float) -> Float:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: Float = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _margin(rows: Float) -> Float:
    if rows.shape[1] < 2:
        return np.full(len(rows), np.inf, np.float32)
    top = np.partition(rows, rows.shape[1] - 2, axis=1)[:, -2:]
    return np.asarray(np.abs(top[:, 1] - top[:, 0]))
