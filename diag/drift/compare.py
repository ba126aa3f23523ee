"""Calibration and production side by side, tensor by tensor, and what the report says of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from diag.drift import distance
from diag.drift.judge import Judged, Verdict, judge_tensor, verdict_of
from diag.drift.requests import share_interval
from diag.drift.rules import DriftRules
from diag.drift.side import Side
from diag.drift.spread import LAST_CODE, Double, counts_between
from diag.report.drift import DriftFigure, DriftTensor

Pair = tuple[Side, Side]
"""Calibration and production of one tensor."""


@dataclass(frozen=True, slots=True)
class Compared:
    """All tensors that both sides hold, in graph order."""

    pairs: Mapping[str, Pair]
    judged: tuple[Judged, ...]
    verdict: Verdict

    @property
    def drifting(self) -> tuple[str, ...]:
        """Tensors that are not ok, in graph order."""
        return tuple(tensor.name for tensor in self.judged if tensor.level != "ok")

    @property
    def worst_loss_db(self) -> float:
        return max((t.figures["sqnr_loss_db"].value for t in self.judged), default=0.0)

    @property
    def worst_saturation(self) -> float:
        return max((t.figures["saturation"].value for t in self.judged), default=0.0)


def compare(calibration: Mapping[str, Side], production: Mapping[str, Side], rules: DriftRules) -> Compared:
    """Judge every tensor that both sides hold values of, in production's order."""
    pairs = {
        name: (calibration[name], side)
        for name, side in production.items()
        if name in calibration and (side.spread.elements or side.nonfinite)
    }
    judged = tuple(judge_tensor(name, *pair, rules) for name, pair in pairs.items())
    return Compared(pairs, judged, verdict_of(judged))


def histogram_edges(pairs: Iterable[Pair]) -> Double:
    """Edges of a report's histograms: 0, then half octaves about the range, so that 127 is one of them."""
    most = max((side.absmax for pair in pairs for side in pair), default=0.0)
    beyond = min(max(math.ceil(2 * math.log2(max(most / LAST_CODE, 1.0))), 2), 32)
    return np.concatenate([[0.0], LAST_CODE * np.exp2(np.arange(-16, beyond + 1) / 2)])


def tensor_report(judged: Judged, pair: Pair, layer: str, edges: Double) -> DriftTensor:
    """What the report says of one tensor."""
    calibration, production = pair
    first, second = distance.code_shares(calibration.spread, production.spread)
    null = _halves_shares(calibration)
    alive = (
        distance.channels_alive(calibration.channels, production.channels).tolist()
        if calibration.channels is not None
        and production.channels is not None
        and calibration.channels.shape == production.channels.shape
        else []
    )
    return DriftTensor(
        tensor=judged.name,
        layer=layer,
        level=judged.level,
        figures={
            name: DriftFigure(value=f.value, calibration=f.calibration, null=f.null, level=f.level)
            for name, f in judged.figures.items()
        },
        calibration_sqnr_db=calibration.noise.sqnr_db,
        production_sqnr_db=production.noise.sqnr_db,
        saturation_interval=saturation_interval(production),
        clipped_energy_ratio=production.noise.clipped_energy_ratio,
        absmax_ratio=production.absmax / calibration.absmax if calibration.absmax else math.inf,
        psi=distance.psi(first, second),
        psi_null=None if null is None else distance.psi(*null),
        jensen_shannon_bits=distance.jensen_shannon(first, second),
        jensen_shannon_null_bits=None if null is None else distance.jensen_shannon(*null),
        dead_codes=distance.dead_codes(calibration.spread, production.spread),
        alive_channels=alive,
        nonfinite=judged.nonfinite,
        calibration_shares=_shares(calibration, edges),
        production_shares=_shares(production, edges),
    )


def saturation_interval(side: Side) -> tuple[float, float]:
    """95 % interval of the saturated share over requests; 0 to 1 where requests were not kept apart."""
    if side.requests is None:
        return 0.0, 1.0
    return share_interval(side.saturation, side.requests.saturation_variance, side.requests.number)


def _halves_shares(calibration: Side) -> tuple[Double, Double] | None:
    """Shares of codes in the two halves of the calibration data: what equal data show."""
    if len(calibration.halves) != 2:
        return None
    first, second = (half.spread for half in calibration.halves)
    return distance.code_shares(first, second)


def _shares(side: Side, edges: Double) -> list[float]:
    """Share of the elements in each bin; what lies beyond the last edge is in the last bin."""
    folded = side.spread.magnitudes()
    reached = edges.copy()
    reached[-1] = max(reached[-1], folded.edges[-1])
    shares = counts_between(folded, reached) / max(folded.elements, 1.0)
    return [float(f"{share:.4g}") for share in shares]
