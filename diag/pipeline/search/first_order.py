"""The damage that each candidate does alone, predicted to first order: its own error, carried by gradients.

With one candidate lowered, the network behind it computes in FP32 on a known error e, so its effect on the
outputs is Je up to second order. A backward pass gives a random component of Je for every candidate at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diag.compare.record import Array
from diag.engines.autograd import Autograd
from diag.numerics.measured import Kind, TensorKind
from diag.pipeline.prepare import Planned
from diag.progress import Progress
from diag.search.probes import QUANTITIES, Quantity, predicted_metrics, probe
from diag.search.rank import Candidate
from diag.search.target import Target

PROBES = 16
"""Backward passes for each quantity. With 32 the order is hardly better (docs/measurements, cheap scores)."""

_FEWEST = 4
"""With fewer passes local errors order as well (measured there too)."""


def predicted_damages(
    planned: Planned,
    candidates: Sequence[Candidate],
    errors: Mapping[str, Array],
    feed: Mapping[str, Array],
    target: Target,
    kinds: Mapping[str, TensorKind],
    progress: Progress,
    ends: float = math.inf,
) -> dict[str, float]:
    """Predicted damage (see `Target.damage`) of each candidate, by id; infinite where it destroys values.

    `errors` are those of `diag.pipeline.search.local`. A metric that has no quadratic form (the user's own)
    is ordered by noise over signal. After `ends` (by time.monotonic) four passes have to do.
    Raises EngineError when there are no gradients.
    """
    graph = Autograd(planned.model, planned.types, feed, errors)
    tensors = [[t for n in c.layers for t in planned.model.layer_by_id[n].outputs] for c in candidates]
    wanted = _wanted(target, graph.reference, kinds)
    progress.start("gradients: what each layer's error does to the outputs", PROBES * len(wanted))
    costs: dict[str, dict[Quantity, NDArray[np.float64]]] = {}
    for output, quantity in wanted:
        kind = kinds.get(output, TensorKind()).kind
        costs.setdefault(output, {})[quantity] = _mean_squares(
            graph, errors, tensors, (output, quantity, kind), ends, progress
        )
    lost = {name for name, error in errors.items() if not np.isfinite(error).all()}
    return {
        c.id: math.inf
        if lost.intersection(made)
        else _damage(target, {o: {q: float(v[i]) for q, v in by.items()} for o, by in costs.items()})
        for i, (c, made) in enumerate(zip(candidates, tensors, strict=True))
    }


def _wanted(
    target: Target, outputs: Mapping[str, Array], kinds: Mapping[str, TensorKind]
) -> list[tuple[str, Quantity]]:
    """What must be estimated of which output."""
    found: dict[tuple[str, Quantity], None] = {}
    for bound in target.bounds:
        quantity = QUANTITIES.get(bound.metric, "noise")
        for name in outputs:
            decides = kinds.get(name, TensorKind()).kind != "values"
            if bound.output in (None, name) and (decides or quantity != "kl"):
                found[name, quantity] = None
    return list(found)


def _mean_squares(
    graph: Autograd,
    errors: Mapping[str, Array],
    tensors: Sequence[Sequence[str]],
    wanted: tuple[str, Quantity, Kind],
    ends: float,
    progress: Progress,
) -> NDArray[np.float64]:
    """For each candidate (its output tensors), the mean square of its error's random components."""
    output, quantity, kind = wanted
    reference, random = graph.reference[output], np.random.default_rng(0)
    squares: list[list[float]] = []
    while len(squares) < PROBES and (len(squares) < _FEWEST or time.monotonic() < ends):
        signs = random.choice([-1.0, 1.0], reference.shape)
        products = graph.products(errors, {output: probe(quantity, kind, reference, signs)})
        squares.append([sum(products.get(tensor, 0.0) for tensor in made) ** 2 for made in tensors])
        progress.advance()
    return np.asarray(np.mean(np.asarray(squares), axis=0))


def _damage(target: Target, costs: Mapping[str, Mapping[Quantity, float]]) -> float:
    if all(bound.metric in QUANTITIES for bound in target.bounds):
        return target.damage({output: predicted_metrics(by) for output, by in costs.items()})
    return max((cost for by in costs.values() for cost in by.values()), default=0.0)
