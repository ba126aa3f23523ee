"""From exact sums to the ranges of every method: a pure function, so that merged tables come out the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from diag.calibration.records import channels_text, evidence_of
from diag.calibration.sums import TensorSums
from diag.calibration.table import Flag, MethodRange, TensorRange
from diag.numerics.calibrate import clipping, is_coarse, ranges
from diag.numerics.metrics import decibel

_NO_ERROR_DB = 300.0


def tensor_ranges(sums: Mapping[str, TensorSums]) -> dict[str, TensorRange]:
    """The table's entry of each tensor, all methods but `best`."""
    return {name: tensor_range(found, _methods(found)) for name, found in sums.items()}


def tensor_range(sums: TensorSums, methods: Mapping[str, MethodRange]) -> TensorRange:
    """The ranges of some methods, the evidence, and what is odd about the tensor."""
    elements = sums.histogram.elements
    return TensorRange(
        absmax=sums.absmax,
        minimum=sums.minimum if elements else 0.0,
        maximum=sums.maximum if elements else 0.0,
        elements=elements,
        nonfinite=sums.nonfinite,
        flags=tuple(_flags(sums)),
        methods=dict(methods),
        evidence=evidence_of(sums),
        channel_absmax=channels_text(sums.channels),
    )


def _flags(sums: TensorSums) -> Iterable[Flag]:
    histogram = sums.histogram
    if not histogram.elements:
        yield "empty"
    elif not sums.absmax:
        yield "zero"
    else:
        if sums.minimum == sums.maximum:
            yield "constant"
        elif is_coarse(histogram):
            yield "coarse"
        if sums.channels is not None and not np.all(sums.channels):
            yield "zero_channels"


def _methods(sums: TensorSums) -> dict[str, MethodRange]:
    both = sums.histogram
    energy = float(sums.energy)
    found = ranges(both, sums.absmax)
    halves = [ranges(half.histogram, half.absmax) for half in sums.halves]
    known = all(half.histogram.elements for half in sums.halves)
    return {
        name: _costed(sums, energy, limit, _differ(*(half[name] for half in halves)) if known else None)
        for name, limit in found.items()
    }


def _costed(sums: TensorSums, energy: float, limit: float, differ: float | None) -> MethodRange:
    cost = clipping(sums.histogram, sums.absmax, energy, limit)
    return MethodRange(
        absmax=limit,
        clipped_share=cost.clipped_share,
        clipped_energy_ratio=cost.clipped_energy_ratio,
        sqnr_db=finite_db(cost.noise_ratio) if energy else None,
        halves_differ=differ,
    )


def imported_cost(sums: TensorSums, limit: float) -> MethodRange:
    """What a range that others chose costs on measured data; it may be larger than the data's."""
    return _costed(sums, float(sums.energy), limit, None)


def _differ(first: float, second: float) -> float:
    """Difference relative to the larger of the two; 0 for two zeros."""
    return abs(first - second) / max(first, second) if first != second else 0.0


def finite_db(noise_ratio: float) -> float:
    """SQNR in dB of a ratio of noise to signal; 300 stands for infinity, which JSON does not have."""
    found = decibel(1.0, noise_ratio)
    return min(found, _NO_ERROR_DB) if math.isfinite(found) else _NO_ERROR_DB
