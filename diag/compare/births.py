"""Where the error begins: layers whose inputs are good and whose output is bad, first first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the search needs to know of a layer: the tensors that it reads and writes."""

    id: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Damage:
    """What is known of each tensor's accumulated error."""

    sqnr_db: Mapping[str, float]
    """By tensor; one that is not listed is the reference itself."""
    bad: Collection[str]
    destroyed: Collection[str]
    """Those of the bad that lost values altogether (not finite, or whole rows of zeros)."""
    locally_bad: Collection[str]
    """Outputs that are bad on the reference's inputs already."""

    def worst_db(self, names: Collection[str]) -> float:
        return min((self.sqnr_db.get(name, math.inf) for name in names), default=math.inf)


@dataclass
class BirthPlace:
    """A layer that turned good inputs into a bad output, and the bad layers behind it."""

    layer: str
    output: str
    before_db: float
    """SQNR of its worst input; inf when every input is the reference itself."""
    after_db: float
    victims: list[str] = field(default_factory=list)
    reaches_output: bool = False


def find_births(layers: Sequence[LayerFacts], damage: Damage, outputs: Collection[str]) -> list[BirthPlace]:
    """Births in graph order; `outputs` are the graph's outputs.

    A bad layer with a bad input is a victim of the birth that this input goes back to. So is one that is good
    on the reference's inputs and descends from destroyed values, even where they look good in between: in a
    norm, 1 / sqrt(inf) = 0 is a small error of a small number, and destroys the row it multiplies.
    """
    births: list[BirthPlace] = []
    origin: dict[str, BirthPlace] = {}
    taint: dict[str, BirthPlace] = {}
    for layer in layers:
        inherited = next((taint[name] for name in layer.inputs if name in taint), None)
        bad = [name for name in layer.outputs if name in damage.bad]
        if bad:
            source = next((origin[name] for name in layer.inputs if name in origin), None)
            if source is None and not any(name in damage.locally_bad for name in bad):
                source = inherited
            if source is None:
                source = _born(layer, bad, damage)
                births.append(source)
            else:
                source.victims.append(layer.id)
            origin.update(dict.fromkeys(bad, source))
            source.reaches_output |= any(name in outputs for name in bad)
            if any(name in damage.destroyed for name in bad):
                inherited = inherited or source
        if inherited is not None:
            taint.update(dict.fromkeys(layer.outputs, inherited))
    return births


def _born(layer: LayerFacts, bad: Sequence[str], damage: Damage) -> BirthPlace:
    worst = min(bad, key=lambda name: damage.sqnr_db[name])
    return BirthPlace(layer.id, worst, damage.worst_db(layer.inputs), damage.sqnr_db[worst])
