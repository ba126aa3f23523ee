"""Where the error begins: layers whose inputs are good and whose output is bad, first first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the search needs to know of a layer: the tensors that it reads and writes."""

    id: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


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


def find_births(
    layers: Sequence[LayerFacts],
    bad_tensors: Collection[str],
    sqnr_db: Mapping[str, float],
    outputs: Collection[str],
) -> list[BirthPlace]:
    """Births in graph order.

    `bad_tensors` says which tensors are bad, `sqnr_db` gives the accumulated SQNR of each compared tensor,
    `outputs` the graph outputs. A bad layer with a bad input is a victim of the first birth that this input
    goes back to.
    """
    births: list[BirthPlace] = []
    origin: dict[str, BirthPlace] = {}
    for layer in layers:
        bad = [name for name in layer.outputs if name in bad_tensors]
        if not bad:
            continue
        sources = [origin[name] for name in layer.inputs if name in origin]
        if sources:
            source = sources[0]
            source.victims.append(layer.id)
        else:
            worst = min(bad, key=lambda name: sqnr_db[name])
            before = min((sqnr_db.get(n, float("inf")) for n in layer.inputs), default=float("inf"))
            source = BirthPlace(layer.id, worst, before, sqnr_db[worst])
            births.append(source)
        origin.update(dict.fromkeys(bad, source))
        source.reaches_output |= any(name in outputs for name in bad)
    return births
