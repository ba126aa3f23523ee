"""Every number of every layer against brute force: accumulated and local, in three formats, four families."""

from __future__ import annotations

import math

import numpy as np
import pytest
from stepwise import CONTRACTIONS, VIEWS, Stepwise, metrics

from diag.report.io import dumps, loads
from fixtures.graphs import bert, gpt2, llama, vit

FAMILIES = {"bert": bert, "llama": llama, "gpt2": gpt2, "vit": vit}
FORMATS = ("int8", "fp16", "bf16")
WANTED = ("sqnr_db", "rel_l2", "cosine", "max_abs", "mean_error", "worst_batch_sqnr_db")


@pytest.fixture(scope="module")
def brute():
    """Brute force for a family and a format, made once."""
    made = {}

    def make(family, fmt):
        if (family, fmt) not in made:
            fixture = FAMILIES[family]()
            made[family, fmt] = Stepwise(fixture.model, fmt, [fixture.batch(2, seed) for seed in range(3)])
        return made[family, fmt]

    return make


def expected(brute, side, tensor):
    return metrics([v[tensor] for v in brute.reference], [v[tensor] for v in side])


def check(got, want, place):
    for name in WANTED:
        if name not in got:
            assert got["sqnr_db"] == want["sqnr_db"] == math.inf, place
            continue
        if name.endswith("_db"):
            assert got[name] == pytest.approx(want[name], abs=0.02), (place, name)
        else:
            assert got[name] == pytest.approx(want[name], rel=5e-3, abs=1e-7), (place, name)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_outputs_agree_with_brute_force(compared, brute, family, fmt):
    fixture = FAMILIES[family]()
    report = compared(fixture, fmt)
    assert loads(dumps(report), "report") == report
    by_hand = brute(family, fmt)
    nodes = {node.name: node for node in fixture.model.graph.node}
    for layer in report.layers:
        (tensor,) = layer.outputs if len(layer.outputs) == 1 else (None,)
        if tensor is None:
            continue  # a Split: its worst output is told
        place = f"{layer.name} {layer.op_type}"
        check(layer.accumulated, expected(by_hand, by_hand.accumulated, tensor), place)
        lowered = layer.op_type in CONTRACTIONS if fmt == "int8" else True
        assert bool(layer.local) <= lowered, place
        if lowered and layer.op_type not in VIEWS:
            assert layer.local, place
            check(layer.local, expected(by_hand, by_hand.local, tensor), place)
    for output in report.outputs:
        check(output.metrics, expected(by_hand, by_hand.accumulated, output.name), output.name)
    assert {output.name for output in report.outputs} == {v.name for v in fixture.model.graph.output}
    computed = {name for name in fixture.truth if name in {layer.name for layer in report.layers}}
    assert len(computed) > 0.8 * len(fixture.truth)
    assert all(layer.op_type == nodes[layer.name].op_type for layer in report.layers)


@pytest.mark.parametrize("fmt", FORMATS)
def test_several_outputs_of_a_layer_tell_the_worst(compared, brute, fmt):
    fixture = gpt2()
    by_hand = brute("gpt2", fmt)
    splits = [layer for layer in compared(fixture, fmt).layers if len(layer.outputs) > 1]
    assert splits
    for layer in splits:
        values = [expected(by_hand, by_hand.accumulated, name)["sqnr_db"] for name in layer.outputs]
        assert layer.accumulated["sqnr_db"] == pytest.approx(min(values), abs=0.02)


def test_the_plans_pins_are_computed_in_their_format(compared, brute, tmp_path):
    """The head in FP32 still receives its input in FP16; that is all the error it has of its own."""
    fixture = llama()
    plan = tmp_path / "plan.yaml"
    plan.write_text("schema: trtdiag.plan/1\ndefault: fp16\npins: [{role: lm_head, format: fp32}]\n")
    report = compared(fixture, plan=str(plan))
    head = next(layer for layer in report.layers if layer.role == "lm_head")
    assert head.format == "fp32"
    by_hand = brute("llama", "fp16")
    node = fixture.node(head.name)
    weight = by_hand.constants[node.input[1]]
    exact = [values[head.outputs[0]] for values in by_hand.reference]
    local = [v[node.input[0]].astype(np.float16).astype(np.float32) @ weight for v in by_hand.reference]
    check(head.local, metrics(exact, local), head.name)
    accumulated = [values[node.input[0]] @ weight for values in by_hand.accumulated]
    check(head.accumulated, metrics(exact, accumulated), head.name)
    others = {layer.format for layer in report.layers if layer.role != "lm_head"}
    assert "fp16" in others


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_the_reference(compared, family):
    report = compared(FAMILIES[family](), "fp32")
    assert all(output.metrics["sqnr_db"] == math.inf for output in report.outputs)
    assert all(not layer.local for layer in report.layers)
    assert report.births == report.findings == []
