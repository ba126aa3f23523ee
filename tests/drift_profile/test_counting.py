"""Every figure of a tensor against its definition, computed element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diag.drift.accumulate import count_batch, requests_of
from diag.drift.bins import BINS, EDGES, bins_of
from diag.drift.merge import merge
from diag.drift.stats import Tensor, TensorStats, empty_stats


def counted(x: np.ndarray, limit: float, requests: int | None = None) -> TensorStats:
    like = empty_stats("a" * 64, None, (Tensor("t", "activation", limit, "table"),))
    inputs = {"i": np.arange(requests or len(x))[:, None]}
    return count_batch(like, {"t": x}, requests_of(inputs, "b"))["t"]


def by_hand(x: np.ndarray, limit: float) -> dict[str, float]:
    """From the definitions, in float64, with no bins."""
    steps = x[np.isfinite(x)].astype(np.float64) * 127 / limit
    quantized = np.clip(np.rint(steps), -127, 127)
    clipped = np.abs(x[np.isfinite(x)]) > np.float32(limit)
    return {
        "sum": steps.sum(),
        "energy": (steps**2).sum(),
        "noise": ((steps - quantized) ** 2).sum(),
        "clipped_energy": (np.maximum(np.abs(steps) - 127, 0)[clipped] ** 2).sum(),
        "clipped": clipped.sum(),
    }


SHAPES = {
    "normal": lambda r: r.normal(size=(6, 4000)),
    "heavy": lambda r: r.standard_t(2, (3, 50_000)),
    "softmax": lambda r: r.dirichlet(np.full(64, 0.1), (4, 12, 64)),
    "relu": lambda r: np.maximum(r.normal(size=(5, 777)), 0),
    "far": lambda r: r.normal(size=(4, 500)) * 255,
    "tiny": lambda r: r.normal(size=(4, 500)) * 1e-6,
    "masked": lambda r: np.where(r.random((4, 500)) < 0.3, -3.4e38, r.normal(size=(4, 500))),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("limit", [1.0, 3.7, 1e-3])
def test_figures_are_their_definitions(name, limit):
    x = SHAPES[name](np.random.default_rng(0)).astype(np.float32)
    found, expected = counted(x, limit), by_hand(x, limit)
    for moment in ("sum", "energy", "noise", "clipped_energy"):
        size = expected[moment] if moment != "sum" else np.abs(x).astype(np.float64).sum() * 127 / limit
        assert found.moment(moment) == pytest.approx(expected[moment], rel=2e-4, abs=1e-6 * size), moment
    assert found.clipped == expected["clipped"]
    assert found.elements == x.size
    assert (found.minimum, found.maximum) == (x.min(), x.max())
    assert found.tally("zeros") == np.count_nonzero(x == 0)
    assert found.tally("subnormals") == np.count_nonzero((x != 0) & (np.abs(x) < 2.0**-14))
    ratio = expected["energy"] / expected["noise"]
    assert found.sqnr_db == pytest.approx(10 * math.log10(ratio), abs=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_bins_hold_what_lies_between_their_edges(name):
    x = SHAPES[name](np.random.default_rng(1)).astype(np.float32)
    limit = 2.0
    counts = counted(x, limit).counts
    steps = x.astype(np.float64) * 127 / limit
    edges = EDGES.copy()
    edges[0], edges[-1] = -np.inf, np.inf
    # (a, b] inside the range and above it, [a, b) below it: away from zero on either side
    outer = np.searchsorted(EDGES, -127.0)
    expected = np.histogram(-steps, -edges[: outer + 1][::-1])[0][::-1]
    inner = np.histogram(-steps[steps >= -127], -edges[outer:][::-1])[0][::-1]
    for found, wanted in ((counts[:outer], expected), (counts[outer:], inner)):
        # float32 rounds an element in 10^5 or so across an edge
        assert np.abs(np.cumsum(found) - np.cumsum(wanted)).max() <= 2 + x.size * 5e-5
    assert counts.sum() == x.size


def test_the_range_itself_is_inside_and_its_neighbour_is_not():
    limit = np.float32(0.7310586)
    above = np.nextafter(limit, np.float32(9))
    found = counted(np.array([[limit, -limit, above, -above, -above]], np.float32), float(limit))
    assert found.clipped == 3
    assert found.counts[EDGES.searchsorted(127.0) - 1] == 1
    assert found.counts[EDGES.searchsorted(127.0)] == 1
    assert found.counts[EDGES.searchsorted(-127.0) - 1] == 2


def test_edges_are_halves_of_codes_and_octaves():
    inside = EDGES[np.abs(EDGES) <= 127]
    np.testing.assert_array_equal(inside, np.arange(-508, 509) / 4)
    assert EDGES.size - 1 == BINS
    beyond = EDGES[EDGES > 127]
    np.testing.assert_allclose(np.log2(beyond / 127), np.arange(1, 129) / 8, rtol=1e-12)
    np.testing.assert_array_equal(-EDGES[::-1], EDGES)


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e9, 1e9)))
def test_every_value_lies_in_its_bin(steps):
    bins = bins_of(steps, np.abs(steps) > 127)
    low, high = EDGES[bins], EDGES[bins + 1]
    low[bins == 0], high[bins == BINS - 1] = -np.inf, np.inf
    assert ((low <= steps) & (steps <= high)).all()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 3.0])
def test_sqnr_of_uniform_values_in_closed_form(factor):
    """Uniform on +-factor * range: noise step^2/12 inside, (f - 1)^3 / (3 f) range^2 cut off beyond."""
    x = np.linspace(-factor, factor, 400_001, dtype=np.float64).astype(np.float32)[None]
    step, inside = 1 / 127, min(1.0, 1 / factor)
    clipped = (factor - 1) ** 3 / (3 * factor) if factor > 1 else 0.0
    # beyond the range the error is x - 1; up to half a step inside of it, it is rounding still
    expected = 10 * math.log10((factor**2 / 3) / (step**2 / 12 * inside + clipped))
    found = counted(x, 1.0)
    assert found.sqnr_db == pytest.approx(expected, abs=0.02)
    assert found.clipped / found.elements == pytest.approx(max(1 - 1 / factor, 0), abs=1e-4)


def test_the_spread_is_that_of_the_values():
    x = np.maximum(np.random.default_rng(0).normal(size=(4, 5000)), 0).astype(np.float32)
    found = counted(x, 2.0)
    spread = found.spread()
    assert spread.zeros == np.count_nonzero(x == 0)
    assert spread.elements == x.size
    assert sum(half.spread().elements for half in found.halves) == x.size
    middle = (spread.edges[:-1] + spread.edges[1:]) / 2
    assert (middle @ spread.counts) / x.size * 2 / 127 == pytest.approx(x.mean(), abs=2 / 127 / 8)


def test_requests_are_told_apart():
    x = np.stack([np.full(50, v, np.float32) for v in (0.1, 0.2, 3.0)])
    found = counted(x, 1.0)
    assert found.requests == 3
    assert found.moment("absmax") == pytest.approx(127 * 3.3)
    assert found.moment("absmax_squared") == pytest.approx(127**2 * (0.01 + 0.04 + 9))
    assert found.moment("clipped_squared") == 50**2
    assert found.moment("clipped_elements") == 50 * 50
    assert found.moment("elements_squared") == 3 * 50**2
    assert sorted(found.sample[:, 0]) == pytest.approx([12.7, 25.4, 381], rel=2**-7)
    assert found.worst[0][0] == "b[2]"
    assert found.worst[0][1] == pytest.approx(4 / 9, rel=1e-5)


def test_a_tensor_that_cannot_be_told_by_requests_counts_as_one():
    found = counted(np.ones((1, 64), np.float32), 2.0, requests=5)
    assert (found.requests, found.elements, found.sample.size) == (1, 64, 0)
    assert len(found.worst) == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.uint8, np.bool_])
def test_every_numeric_type(dtype):
    x = np.array([[0, 1, 3], [7, 90, 120]]).astype(dtype)
    found = counted(x, 127.0)
    assert (found.minimum, found.maximum) == (0, x.max())
    assert found.mean == pytest.approx(x.astype(np.float64).mean())
    assert found.moment("noise") == 0


def test_large_token_ids_are_exact():
    x = np.array([[2**31 + 1, -(2**40) - 1]])
    found = counted(x, 127.0)
    assert (found.minimum, found.maximum) == (-(2**40) - 1, 2**31 + 1)


def test_empty_tensors_and_tensors_of_nan():
    nothing = counted(np.zeros((2, 0), np.float32), 1.0)
    assert (nothing.elements, nothing.requests, nothing.absmax, nothing.mean) == (0, 1, 0.0, 0.0)
    lost = counted(np.full((2, 3), np.nan, np.float32), 1.0)
    assert (lost.elements, lost.tally("nan"), lost.absmax) == (0, 6, 0.0)
    assert lost.counts.sum() == lost.tally("zeros") == 0
    joined = merge([lost.stats, counted(np.ones((2, 3), np.float32), 1.0).stats])["t"]
    assert (joined.elements, joined.maximum, joined.tally("nan")) == (6, 1.0, 6)


def test_a_batch_without_elements_leaves_the_channels_as_they_are():
    like = empty_stats("a" * 64, None, (Tensor("t", "activation", 1.0, "table"),))
    full, nothing = np.array([[0.5, -0.25], [0.1, 0.75]], np.float32), np.zeros((2, 0), np.float32)
    parts = [
        count_batch(like, {"t": x}, requests_of({"i": np.arange(2)[:, None] + n}, "b"), {"t": 1})
        for n, x in ((0, full), (10, nothing))
    ]
    for order in (parts, parts[::-1]):
        channels = merge(order)["t"].channels
        assert channels is not None
        assert channels.absmax.tolist() == [0.5, 0.75]
        assert channels.elements == 2


@pytest.mark.parametrize("width", [9, 3000, 100_000])
def test_nan_leaves_the_rest_as_it_is(width):
    x = np.random.default_rng(0).normal(size=(4, width)).astype(np.float32)
    x[0, 3] = x[2, 5] = np.nan
    x[2, 1] = -np.inf
    found, expected = counted(x, 2.5), by_hand(x, 2.5)
    assert (found.tally("nan"), found.tally("negative_infinite"), found.tally("positive_infinite")) == (
        2,
        1,
        0,
    )
    assert found.tally("bad_requests") == 2
    assert found.tally("zeros") == 0
    assert found.elements == x.size - 3
    assert found.moment("noise") == pytest.approx(expected["noise"], rel=1e-4)
    assert found.clipped == expected["clipped"]
    assert found.minimum == np.nanmin(np.where(np.isinf(x), np.nan, x))
