"""Where scale can move, and that it moves without a trace in FP32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compensation_graphs import (
    HIDDEN,
    WIDTH,
    attention_model,
    gelu_model,
    gemm_model,
    norm_model,
    outlier_gamma,
    rms_model,
    run,
    swiglu_model,
    uniform,
)

from diag.compensation.edit import Rewrite
from diag.compensation.sites import Site, find_sites
from diag.compensation.smoothing import apply_scale
from diag.compensation.splitting import Split, apply_split
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import load_model
from diag.typed.types import complete

MODELS: dict[str, tuple[Callable[[Path], str], str]] = {
    "layer norm": (lambda folder: norm_model(folder, outlier_gamma(50)), "norm"),
    "rms norm spelled out": (lambda folder: rms_model(folder, outlier_gamma(50)), "norm"),
    "gemm": (gemm_model, "act"),
    "swiglu": (swiglu_model, "product"),
    "gelu": (gelu_model, "gelu"),
    "values": (lambda folder: attention_model(folder, 4, 4), "joined"),
    "values of grouped queries": (lambda folder: attention_model(folder, 4, 2), "joined"),
}


def site_of(model: Model, tensor: str) -> Site:
    return next(s for s in find_sites(model, [tensor], complete(shapes.infer(model), model)))


def feed() -> dict[str, np.ndarray]:
    return {"x": uniform(9, 1, 24, WIDTH)}


def factors_for(site: Site, powers_of_two: bool) -> np.ndarray:
    exponents = np.random.default_rng(1).uniform(-4, 4, site.channels)
    factors = np.exp2(np.rint(exponents) if powers_of_two else exponents).astype(np.float32)
    if site.ties is not None:
        factors = factors[site.ties]
    return factors


@pytest.fixture(params=list(MODELS))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, Site]:
    make, tensor = MODELS[request.param]
    model = load_model(make(tmp_path))
    return model, site_of(model, tensor)


def test_the_scale_goes_into_constants_that_are_there(named: tuple[Model, Site]) -> None:
    model, site = named
    assert site.folds
    rewrite = Rewrite(model)
    assert apply_scale(rewrite, site, factors_for(site, True)) == site.tensor
    edited = rewrite.finish()
    assert [x.id for x in edited.layers] == [x.id for x in model.layers]


def test_powers_of_two_leave_every_bit(named: tuple[Model, Site]) -> None:
    model, site = named
    rewrite = Rewrite(model)
    apply_scale(rewrite, site, factors_for(site, True))
    before, after = run(model, feed()), run(rewrite.finish(), feed())
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)


def test_any_factors_move_outputs_by_rounding_only(named: tuple[Model, Site]) -> None:
    model, site = named
    rewrite = Rewrite(model)
    apply_scale(rewrite, site, factors_for(site, False))
    before, after = run(model, feed()), run(rewrite.finish(), feed())
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max())


def test_the_tensor_itself_is_divided(named: tuple[Model, Site]) -> None:
    model, site = named
    factors = factors_for(site, True)
    rewrite = Rewrite(model)
    apply_scale(rewrite, site, factors)
    edited = rewrite.finish()
    seen = [observed(m, site.tensor) for m in (model, edited)]
    np.testing.assert_array_equal(seen[1], seen[0] / factors)


def observed(model: Model, tensor: str) -> np.ndarray:
    from diag.engines.onnxruntime import Session
    from diag.engines.reference import with_outputs

    return Session(with_outputs(model.proto, [tensor]), model.weights).run(feed())[tensor]


def test_splits_are_exact(named: tuple[Model, Site]) -> None:
    model, site = named
    if site.ties is not None:
        pytest.skip("channels that are tied are not split")
    rewrite = Rewrite(model)
    doubled = np.array([1, 5])
    tensor = apply_split(rewrite, Split(site, doubled, {}))
    edited = rewrite.finish()
    before, after = run(model, feed()), run(edited, feed())
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
    plain, split = observed(model, site.tensor), observed(edited, tensor)
    assert split.shape[-1] == site.channels + 2
    np.testing.assert_array_equal(split[..., 5], plain[..., 5] / 2)
    np.testing.assert_array_equal(split[..., -1], plain[..., 5] / 2)
    np.testing.assert_array_equal(split[..., 0], plain[..., 0])


def test_grouped_queries_share_the_values_of_consecutive_heads(tmp_path: Path) -> None:
    site = site_of(load_model(attention_model(tmp_path, 4, 2)), "joined")
    assert site.ties is not None
    assert site.ties.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]


def test_a_norm_that_a_residual_reads_keeps_its_constants(tmp_path: Path) -> None:
    model = load_model(norm_model(tmp_path, outlier_gamma(50), residual=True))
    site = site_of(model, "norm")
    assert not site.folds
    assert [taker.layer for taker in site.takers] == ["q", "k"]
    rewrite = Rewrite(model)
    tensor = apply_scale(rewrite, site, factors_for(site, True))
    edited = rewrite.finish()
    before, after = run(model, feed()), run(edited, feed())
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
    assert tensor != "norm"
    assert edited.layer_by_id["sum"].inputs == ("k", "norm")
    assert edited.layer_by_id["q"].inputs[0] == tensor == edited.layer_by_id["k"].inputs[0]


def test_a_tensor_that_is_an_output_keeps_its_scale(tmp_path: Path) -> None:
    assert not site_of(load_model(gemm_model(tmp_path, residual=True)), "act").folds


def test_a_constant_that_others_read_stays_for_them(tmp_path: Path) -> None:
    from compensation_graphs import Graph

    g = Graph()
    half = g.constant("half", np.float32(0.5))
    g.add("Mul", ["x", half], "a")
    g.add("Mul", ["x", half], "b")
    g.linear("y", "a", uniform(1, WIDTH, HIDDEN))
    model = load_model(g.saved(tmp_path, ["y", "b"]))
    site = site_of(model, "a")
    assert site.folds
    rewrite = Rewrite(model)
    apply_scale(rewrite, site, factors_for(site, True))
    edited = rewrite.finish()
    before, after = run(model, feed()), run(edited, feed())
    np.testing.assert_array_equal(after["b"], before["b"])
    np.testing.assert_array_equal(after["y"], before["y"])
    assert edited.layer_by_id["b"].inputs == ("x", "half")


def test_a_walk_ends_at_functions_that_do_not_scale(tmp_path: Path) -> None:
    from compensation_graphs import Graph

    g = Graph()
    g.linear("up", "x", uniform(1, WIDTH, HIDDEN))
    g.add("Sigmoid", ["up"], "act")
    g.linear("y", "act", uniform(2, HIDDEN, WIDTH))
    assert not site_of(load_model(g.saved(tmp_path, ["y"])), "act").folds


def test_a_reader_of_the_shape_only_is_no_reader(tmp_path: Path) -> None:
    from compensation_graphs import Graph

    g = Graph()
    gamma = [g.constant("gamma", outlier_gamma(2)), g.constant("beta", outlier_gamma(1))]
    g.add("LayerNormalization", ["x", *gamma], "norm", axis=-1)
    g.linear("up", "norm", uniform(1, WIDTH, WIDTH))
    g.add("Reshape", ["up", g.add("Shape", ["norm"], "shape")], "y")
    assert site_of(load_model(g.saved(tmp_path, ["y"])), "norm").folds
