"""The graph generators: valid ONNX that runs, sane values, the same seed gives the same graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from fixtures.graphs import GRAPHS, Dims, GraphFixture, bert, conformer, gpt2, llama, scrambled, vit

TRANSFORMERS = (bert, gpt2, llama, vit, conformer)


def run(fixture: GraphFixture, n: int = 2, seed: int = 0) -> np.ndarray:
    session = ort.InferenceSession(fixture.model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, fixture.batch(n, seed))[0]


@pytest.mark.parametrize("family", GRAPHS)
def test_runs_and_depends_on_its_input(family):
    fixture = GRAPHS[family]()
    onnx.checker.check_model(fixture.model, full_check=True)
    first, other = run(fixture, seed=0), run(fixture, seed=1)
    assert np.isfinite(first).all()
    assert 0.05 * first.std() < np.abs(first - other).mean()
    assert np.array_equal(run(GRAPHS[family]()), first)
    assert run(fixture, n=3).shape == (3, *first.shape[1:])


@pytest.mark.parametrize("make", TRANSFORMERS)
@pytest.mark.parametrize(("norm", "attention"), [("fused", "decomposed"), ("decomposed", "fused")])
def test_fused_forms_compute_the_same(make, norm, attention):
    fused = make(norm=norm, attention=attention)
    onnx.checker.check_model(fused.model, full_check=True)
    assert np.allclose(run(fused), run(make()), atol=1e-5)


@pytest.mark.parametrize("make", [bert, vit])
def test_contrib_attention_computes_the_same(make):
    assert np.allclose(run(make(attention="contrib")), run(make()), atol=1e-5)


@pytest.mark.parametrize("family", GRAPHS)
def test_scrambled_names_mean_nothing_and_change_nothing(family):
    fixture = GRAPHS[family]()
    blind = scrambled(fixture, seed=3)
    onnx.checker.check_model(blind.model, full_check=True)
    assert {node.name for node in blind.model.graph.node} == {
        f"n{i}" for i in range(len(fixture.model.graph.node))
    }
    assert sorted(map(str, blind.truth.values())) == sorted(map(str, fixture.truth.values()))
    assert np.array_equal(run(blind), run(fixture))


@pytest.mark.parametrize("family", GRAPHS)
def test_truth_names_nodes_that_exist(family):
    fixture = GRAPHS[family]()
    assert set(fixture.truth) <= {node.name for node in fixture.model.graph.node}


def test_llama_counts_its_projections():
    fixture = llama(Dims(blocks=3))
    for role, each in {"qkv_proj": 3, "attn_out_proj": 1, "ffn_gate": 1, "ffn_up": 1, "ffn_down": 1}.items():
        assert [len(fixture.nodes(role, block)) for block in range(3)] == [each] * 3
    assert len(fixture.nodes("lm_head")) == 1


def test_padding_changes_nothing_before_it():
    fixture = bert()
    feeds = fixture.batch(2, 0)
    changed = {**feeds, "input_ids": feeds["input_ids"].copy()}
    padded = feeds["attention_mask"][1] == 0
    changed["input_ids"][1, padded] = 1
    session = ort.InferenceSession(fixture.model.SerializeToString(), providers=["CPUExecutionProvider"])
    before, after = session.run(None, feeds)[0], session.run(None, changed)[0]
    assert np.allclose(before[1, ~padded], after[1, ~padded])
    assert not np.allclose(before[1, padded], after[1, padded])
