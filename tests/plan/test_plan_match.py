"""From targets to layers, against brute force; and what is said when nothing fits."""

from __future__ import annotations

import fnmatch
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import ATTENTION_BLOCKS, ATTENTION_ROLES, FLOAT, Model, attention, model, node, weight

from diag.errors import PlanError
from diag.plan.match import Targets
from diag.plan.resolve import resolve
from diag.plan.schema import Pin, Plan

ATTENTION = attention()
TARGETS = Targets(ATTENTION, ATTENTION_ROLES, {**ATTENTION_BLOCKS, "res": 1, "out": 2})


def named(names: list[str]) -> Model:
    """A chain of Relu layers with the given names."""
    nodes = [node("Relu", f"t{i}", f"t{i + 1}", name) for i, name in enumerate(names)]
    return model(nodes, {"t0": (FLOAT, [1])}, [f"t{len(names)}"])


@pytest.mark.parametrize(
    ("match", "found"),
    [
        ("/layers.1/fc", ["/layers.1/fc"]),
        ("/layers.1/f", []),
        ("re:^/layers\\.[0-1]/", ["/layers.0/fc", "/layers.1/fc", "/layers.1/fc2"]),
        ("re:fc$", ["/layers.0/fc", "/layers.1/fc", "/Layers.2/fc"]),
        ("glob:/layers.?/fc", ["/layers.0/fc", "/layers.1/fc"]),
        ("glob:*fc*", ["/layers.0/fc", "/layers.1/fc", "/layers.1/fc2", "/Layers.2/fc"]),
        ("glob:fc", []),
        ("glob:/[!L]*", ["/layers.0/fc", "/layers.1/fc", "/layers.1/fc2"]),
    ],
)
def test_names_patterns_and_globs(match: str, found: list[str]) -> None:
    names = ["/layers.0/fc", "/layers.1/fc", "/layers.1/fc2", "/Layers.2/fc"]
    assert list(Targets(named(names), {}, {}).match(Pin(match=match, format="fp16"))) == found


KEYS = {
    "match": [None, "q", "re:^[qk]", "glob:*o*", "glob:*"],
    "role": [None, "norm", "qkv_proj", "residual_add"],
    "op_type": [None, "MatMul", "Add", "Reshape"],
    "block": [None, 0, "0-1", "1-2", 7],
}


def test_keys_together_mean_layers_that_all_of_them_match() -> None:
    for values in itertools.product(*KEYS.values()):
        given_keys = {key: value for key, value in zip(KEYS, values, strict=True) if value is not None}
        if not given_keys:
            continue
        pin = Pin.model_validate({**given_keys, "format": "fp16"})
        expected = {layer.id for layer in ATTENTION.layers}
        for key, value in given_keys.items():
            expected &= {layer.id for layer in ATTENTION.layers if fits(key, value, layer.id, layer.op_type)}
        found = TARGETS.match(pin)
        assert set(found) == expected
        assert list(found) == [layer.id for layer in ATTENTION.layers if layer.id in expected]


def fits(key: str, value: object, name: str, op_type: str) -> bool:
    """What each key means, written out apart from the product."""
    if key == "match":
        text = str(value)
        if text.startswith("re:"):
            return re.search(text[3:], name) is not None
        return fnmatch.fnmatchcase(name, text[5:]) if text.startswith("glob:") else name == text
    if key == "role":
        return ATTENTION_ROLES.get(name, "") == value
    if key == "op_type":
        return op_type == value
    first, last = {0: (0, 0), "0-1": (0, 1), "1-2": (1, 2), 7: (7, 7)}[value]  # type: ignore[index]
    number = TARGETS.blocks.get(name)
    return number is not None and first <= number <= last


@given(st.lists(st.text("ab/.", min_size=1, max_size=4), min_size=1, max_size=6, unique=True), st.data())
def test_an_exact_name_is_never_a_pattern(names: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names))
    assert Targets(named(names), {}, {}).match(Pin(match=name, format="fp16")) == (name,)


UNMATCHED = [
    ({"match": "Q"}, "pin 1 (match 'Q') matches no layer. Did you mean 'q'?"),
    ({"match": "softmaxx"}, "pin 1 (match 'softmaxx') matches no layer. Did you mean 'softmax'?"),
    (
        {"match": "scores"},
        "pin 1 (match 'scores') matches no layer. It is a tensor; the node that writes it is 'qk'.",
    ),
    (
        {"match": "re:^reshape"},
        "pin 1 (match 're:^reshape') matches no layer. Names in this model are like 'out_reshape'.",
    ),
    (
        {"match": "glob:softmax?"},
        "pin 1 (match 'glob:softmax?') matches no layer. Names in this model are like 'softmax'.",
    ),
    (
        {"match": "re:/sofmax[0-9]"},
        "pin 1 (match 're:/sofmax[0-9]') matches no layer. Names in this model are like 'softmax'.",
    ),
    (
        {"match": "re:^$"},
        "pin 1 (match 're:^$') matches no layer. Names in this model are like 'pow', 'mean', 'eps'.",
    ),
    ({"role": "norms"}, "pin 1 (role 'norms') matches no layer. Did you mean 'norm'?"),
    (
        {"role": "conv"},
        "pin 1 (role 'conv') matches no layer. Roles in this model: attn_out_proj, attn_softmax, norm, "
        "pv_matmul, qk_matmul, qkv_proj, residual_add.",
    ),
    ({"op_type": "matmul"}, "pin 1 (op_type 'matmul') matches no layer. Did you mean 'MatMul'?"),
    (
        {"op_type": "LSTM"},
        "pin 1 (op_type 'LSTM') matches no layer. Operators in this model: Add, Concat, Div, Gather, MatMul, "
        "Mul, Pow, ReduceMean, Reshape, Shape, Softmax, Sqrt, Transpose.",
    ),
    ({"block": 9}, "pin 1 (block 9) matches no layer. Blocks found in this model: 0 to 2."),
    (
        {"role": "norm", "op_type": "MatMul"},
        "pin 1 (role 'norm' and op_type 'MatMul') matches no layer. "
        "Each of its keys matches layers, but no layer matches all of them.",
    ),
    (
        {"role": "pv_matmul", "block": 5},
        "pin 1 (role 'pv_matmul' and block 5) matches no layer. Blocks found in this model: 0 to 2.",
    ),
]


@pytest.mark.parametrize(("target", "sentence"), UNMATCHED, ids=[str(target) for target, _ in UNMATCHED])
def test_a_pin_that_matches_nothing_names_what_is_near(target: dict[str, object], sentence: str) -> None:
    plan = Plan.model_validate({"default": "int8", "pins": [{**target, "format": "fp16"}]})
    with pytest.raises(PlanError) as caught:
        resolve(plan, ATTENTION, TARGETS.roles, TARGETS.blocks, ())
    assert str(caught.value) == sentence


def test_a_model_without_roles_and_blocks_says_so() -> None:
    chain = model([node("MatMul", "x w", "y", "fc")], {"x": (FLOAT, [1, 2])}, ["y"], {"w": weight(2, 2)})
    for target, hint in (
        ({"role": "norm"}, "No roles were found in this model."),
        ({"block": 0}, "No blocks were found in this model."),
        ({"match": "zzz"}, "Layers: fc."),
    ):
        plan = Plan.model_validate({"default": "int8", "pins": [{**target, "format": "fp16"}]})
        with pytest.raises(PlanError) as caught:
            resolve(plan, chain, {}, {}, ())
        assert caught.value.hint == hint
