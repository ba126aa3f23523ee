"""Where an engine leaves its emulation: the layers from which on its tensors are worse than emulated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.engines.runner import Feed
from diag.model.graph import Model
from diag.pipeline.engine.run import output_gaps

_SHARE = 0.1
"""Of the largest departure: smaller ones are codes that round to the other side."""


def departures(
    model: Model, among: Collection[str], engine: Mapping[str, float], emulated: Mapping[str, float]
) -> tuple[str, ...]:
    """Layers of `among` at which the engine's error outgrows the emulation's, the largest growth first.

    `engine` and `emulated` are errors against the reference (relative L2) by tensor. Energies are compared,
    as independent errors add up in them. What lies between two tensors that the engine shows shares the
    growth.
    """
    excess: dict[str, float] = {}
    hidden: dict[str, tuple[str, ...]] = {}
    growth: dict[str, float] = {}
    for layer in model.layers:
        before = max((excess.get(name, 0.0) for name in layer.reads), default=0.0)
        inside = dict.fromkeys(member for name in layer.reads for member in hidden.get(name, ()))
        members = (*inside, *([layer.id] if layer.id in among else []))
        for name in layer.outputs:
            if name not in engine or name not in emulated:
                excess[name], hidden[name] = before, members
                continue
            excess[name] = _excess(_energy(engine[name]), _energy(emulated[name]))
            grown = 0.0 if math.isinf(before) else excess[name] - before
            growth |= {member: max(grown, growth.get(member, 0.0)) for member in members}
    least = _SHARE * max((g for g in growth.values() if math.isfinite(g)), default=0.0)
    found = [member for member, g in growth.items() if g > 0 and g >= least]
    return tuple(sorted(found, key=lambda member: -growth[member]))


def _excess(engine: float, emulated: float) -> float:
    return engine - emulated if engine > emulated else 0.0


def _energy(rel_l2: float) -> float:
    return math.inf if math.isnan(rel_l2) else rel_l2**2


def emulated_errors(model: Model, typed: Model, names: Iterable[str], feed: Feed) -> dict[str, float]:
    """Relative L2 of the emulation's tensors against the reference, on one batch. Holds all of them."""
    wanted = list(names)
    reference = Session(with_outputs(model.proto, wanted), model.weights).run(feed)
    emulation = emulate(typed)
    return output_gaps(reference, Session(with_outputs(emulation.proto, wanted), emulation.weights).run(feed))
