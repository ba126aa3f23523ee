"""Births against their definition, on graphs drawn by hand and by chance."""

from __future__ import annotations

import math
import random

import pytest

from diag.compare.births import Damage, LayerFacts, find_births


def graph(text: str) -> list[LayerFacts]:
    """Layers from lines such as `c: a b` (layer c reads the tensors a and b, and writes the tensor c)."""
    lines = [line.split(":") for line in text.strip().splitlines()]
    return [LayerFacts(name.strip(), tuple(reads.split()), (name.strip(),)) for name, reads in lines]


def damage(bad: str, destroyed: str = "", locally_bad: str = "", **sqnr_db: float) -> Damage:
    values = dict.fromkeys(bad.split(), 5.0) | sqnr_db
    return Damage(values, set(bad.split()), set(destroyed.split()), set(locally_bad.split()))


def summary(layers, found, outputs=()):
    return {b.layer: b.victims for b in find_births(layers, found, set(outputs))}


CHAIN = graph("a: x\nb: a\nc: b\nd: c")
DIAMOND = graph("a: x\nl: a\nr: a\njoin: l r")


def test_nothing_bad_has_no_birth():
    assert find_births(CHAIN, damage(""), {"d"}) == []


def test_a_chain_is_born_once_and_the_rest_are_victims():
    assert summary(CHAIN, damage("b c d")) == {"b": ["c", "d"]}


def test_what_heals_and_goes_bad_again_is_born_twice():
    assert summary(CHAIN, damage("a c d")) == {"a": [], "c": ["d"]}


def test_a_join_of_two_births_belongs_to_the_first_input():
    assert summary(DIAMOND, damage("l r join")) == {"l": ["join"], "r": []}
    assert summary(DIAMOND, damage("r join")) == {"r": ["join"]}
    assert summary(DIAMOND, damage("join")) == {"join": []}


@pytest.mark.parametrize(("bad", "reaches"), [("a", False), ("a b", False), ("c d", True), ("a b c d", True)])
def test_reaching_an_output(bad, reaches):
    births = find_births(CHAIN, damage(bad), {"d"})
    assert births[0].reaches_output is reaches


def test_before_is_the_worst_input_and_after_the_worst_output():
    layers = [LayerFacts("split", ("x", "y", "z"), ("p", "q", "r"))]
    found = Damage({"x": 40.0, "y": 30.0, "p": 12.0, "q": 3.0, "r": 50.0}, {"p", "q"}, set(), set())
    (birth,) = find_births(layers, found, set())
    assert (birth.output, birth.before_db, birth.after_db) == ("q", 30.0, 3.0)


def test_before_is_infinite_when_every_input_is_the_reference():
    (birth,) = find_births(graph("a: x"), damage("a"), set())
    assert birth.before_db == math.inf


NORM = graph("square: x\nroot: square\ninverse: root\nscaled: inverse x\nnext: scaled")


def test_values_destroyed_on_the_way_stay_to_blame_where_they_look_good_in_between():
    """1 / sqrt(inf) = 0 beside values near 0.001 is a good tensor, and its product destroys the row."""
    found = damage("square root scaled next", destroyed="square root scaled")
    assert summary(NORM, found) == {"square": ["root", "scaled", "next"]}


def test_a_layer_that_is_bad_by_itself_is_born_whatever_lies_behind():
    found = damage("square scaled", destroyed="square", locally_bad="scaled")
    assert summary(NORM, found) == {"square": [], "scaled": []}


def test_bad_values_that_were_not_destroyed_leave_no_trace():
    assert summary(NORM, damage("square scaled")) == {"square": [], "scaled": []}


def random_case(seed: int):
    rng = random.Random(seed)
    layers = []
    known = ["x", "y"]
    for number in range(rng.randint(1, 14)):
        reads = tuple(rng.sample(known, min(len(known), rng.randint(1, 3))))
        writes = tuple(f"t{number}.{i}" for i in range(rng.randint(1, 2)))
        layers.append(LayerFacts(f"n{number}", reads, writes))
        known += writes
    made = known[2:]
    bad = {name for name in made if rng.random() < 0.4}
    destroyed = {name for name in bad if rng.random() < 0.3}
    locally = {name for name in bad if rng.random() < 0.3}
    values = {name: rng.uniform(-5, 20) if name in bad else rng.uniform(20, 60) for name in made}
    return layers, Damage(values, bad, destroyed, locally), {made[-1], rng.choice(made)}


def by_definition(layers, found, outputs):
    """Births by asking, tensor by tensor and from the end, where its badness goes back to."""
    maker = {name: layer for layer in layers for name in layer.outputs}

    def bad_outputs(layer):
        return [name for name in layer.outputs if name in found.bad]

    def source(layer) -> str | None:
        """The layer where a bad layer's badness was born."""
        if not bad_outputs(layer):
            return None
        for name in layer.inputs:
            if name in found.bad:
                return source(maker[name])
        if not found.locally_bad.intersection(bad_outputs(layer)):
            return trace(layer) or layer.id
        return layer.id

    def trace(layer) -> str | None:
        """The first birth of destroyed values that the layer descends from."""
        return next(filter(None, (left_by(maker[n]) for n in layer.inputs if n in maker)), None)

    def left_by(layer) -> str | None:
        own = source(layer) if found.destroyed.intersection(bad_outputs(layer)) else None
        return trace(layer) or own

    born = {layer.id: source(layer) for layer in layers}
    result = {}
    for layer in layers:
        if born[layer.id] == layer.id:
            victims = [n for n, s in born.items() if s == layer.id and n != layer.id]
            family = [layer.id, *victims]
            ends = any(name in outputs for n in layers if n.id in family for name in bad_outputs(n))
            result[layer.id] = (victims, ends)
    return result


@pytest.mark.parametrize("block", range(8))
def test_births_agree_with_their_definition(block):
    for seed in range(block * 250, block * 250 + 250):
        layers, found, outputs = random_case(seed)
        births = find_births(layers, found, outputs)
        assert {b.layer: (b.victims, b.reaches_output) for b in births} == by_definition(
            layers, found, outputs
        ), seed
        order = [layer.id for layer in layers]
        assert [b.layer for b in births] == sorted((b.layer for b in births), key=order.index)


@pytest.mark.parametrize("seed", range(200))
def test_a_birth_has_only_good_inputs_and_every_bad_layer_is_accounted_for(seed):
    layers, found, outputs = random_case(seed)
    births = find_births(layers, found, outputs)
    by_id = {layer.id: layer for layer in layers}
    for birth in births:
        assert not found.bad.intersection(by_id[birth.layer].inputs)
        assert birth.output in found.bad
    told = [name for b in births for name in (b.layer, *b.victims)]
    assert sorted(told) == sorted(n.id for n in layers if found.bad.intersection(n.outputs))
