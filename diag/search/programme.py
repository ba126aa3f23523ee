"""The mixed-integer linear programme by which sets of pins are proposed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from diag.search.rank import Effect


def cheapest_set(
    effects: Sequence[Effect],
    cost: np.ndarray,
    rows: np.ndarray,
    least: float = -math.inf,
    most: float | Sequence[float] = math.inf,
) -> frozenset[str]:
    """Ids of the candidates to take at the lowest `cost`, so that `least <= rows @ taken <= most`.

    Empty when no set does (scipy.optimize.milp).
    """
    # A part of the time in which every command starts, and only a search needs it.
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415

    limits = LinearConstraint(rows, lb=least, ub=most)
    solved = milp(cost, constraints=limits, integrality=np.ones(len(effects)), bounds=Bounds(0, 1))
    if solved.x is None:
        return frozenset()
    return frozenset(e.candidate.id for e, taken in zip(effects, solved.x, strict=True) if taken > 0.5)
