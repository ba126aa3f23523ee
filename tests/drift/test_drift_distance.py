"""Distances and costs of a range, against closed forms, SciPy and brute force on raw values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.spatial.distance import jensenshannon

from diag.drift import distance
from diag.drift.requests import range_interval, ratio_low, ratio_variance, requests_needed, share_interval
from diag.drift.spread import Spread, absmax, counts_between, joined, quantile, spread_of

FINE = np.unique(
    np.concatenate(
        [-np.geomspace(128, 4096, 400), np.arange(-128, 128.25, 0.25), np.geomspace(128, 4096, 400)]
    )
)


def from_cdf(cdf, edges=FINE, elements=1e6) -> Spread:
    """A spread with the exact masses of a distribution (in steps)."""
    return Spread(edges, elements * np.diff(cdf(edges)), 0.0)


def brute_sqnr_db(values: np.ndarray) -> float:
    error = np.clip(np.rint(values), -127, 127) - values
    return float(10 * np.log10(np.sum(values**2) / np.sum(error**2)))


def gaussian_sqnr_db(k: float) -> float:
    """Range = k sigma: step^2 / 12 inside, 2 [(1 + k^2) Q(k) - k phi(k)] sigma^2 clipped."""
    step = k / 127
    inside = math.erf(k / math.sqrt(2)) * step**2 / 12
    clipped = 2 * ((1 + k * k) * stats.norm.sf(k) - k * stats.norm.pdf(k))
    return float(-10 * np.log10(inside + clipped))


@pytest.mark.parametrize("k", [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0])
def test_gaussian_at_k_sigma(k: float) -> None:
    spread = from_cdf(stats.norm(scale=127 / k).cdf)
    assert distance.noise(spread).sqnr_db == pytest.approx(gaussian_sqnr_db(k), abs=0.05)


@pytest.mark.parametrize("k", [2.0, 4.0, 8.0, 16.0])
def test_laplace_at_k_scales(k: float) -> None:
    """Clipped energy of a Laplace density of scale b beyond k b: 2 b^2 exp(-k); its variance is 2 b^2."""
    spread = from_cdf(stats.laplace(scale=127 / k).cdf)
    step = k / 127
    expected = -10 * math.log10(((1 - math.exp(-k)) * step**2 / 12 + 2 * math.exp(-k)) / 2)
    assert distance.noise(spread).sqnr_db == pytest.approx(expected, abs=0.1)


def test_uniform() -> None:
    """A full-range uniform signal: 20 log10(254) = 48.1 dB, the textbook's 6.02 n + 0 for 254 steps."""
    spread = from_cdf(stats.uniform(-127, 254).cdf)
    assert distance.noise(spread).sqnr_db == pytest.approx(20 * math.log10(254), abs=0.01)
    assert distance.noise(spread).clipped == pytest.approx(0)


@pytest.mark.parametrize(("shift", "factor"), [(0.0, 4.0), (60.0, 1.0), (90.0, 0.5), (0.0, 0.05)])
def test_shifted_and_scaled_gaussian(shift: float, factor: float) -> None:
    """Against numerical integration of the density: rounding as step^2 / 12, clipping exactly."""
    law = stats.norm(shift, 127 / 4 * factor)
    cut, _ = integrate.quad(lambda x: (x - 127) ** 2 * law.pdf(x), 127, 127 + 60 * law.std(), limit=200)
    low, _ = integrate.quad(lambda x: (x + 127) ** 2 * law.pdf(x), -127 - 60 * law.std(), -127, limit=200)
    inside = (law.cdf(127) - law.cdf(-127)) / 12
    expected = 10 * math.log10((shift**2 + law.var()) / (inside + cut + low))
    assert distance.noise(from_cdf(law.cdf)).sqnr_db == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_sqnr_of_raw_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.laplace(scale=25.0, size=200_000) + 5 * seed
    assert distance.noise(spread_of(values, FINE)).sqnr_db == pytest.approx(brute_sqnr_db(values), abs=0.1)


def test_what_is_smaller_than_half_a_step_is_lost() -> None:
    values = np.random.default_rng(0).uniform(-0.4, 0.4, 10_000)
    assert distance.noise(spread_of(values, np.arange(-128, 128.05, 0.05))).sqnr_db == pytest.approx(
        0, abs=0.05
    )


def test_four_times_the_scale_costs_what_the_study_says() -> None:
    """faults.md B80: a shift by 4 clips 27 % and takes SQNR from 40 to 9 dB (Gaussian, 3.6 to 4 sigma)."""
    before, after = (from_cdf(stats.norm(scale=f * 127 / 4.4).cdf) for f in (1, 4))
    assert distance.saturation(after) == pytest.approx(2 * stats.norm.sf(1.1), abs=1e-3)
    assert distance.saturation(after) == pytest.approx(0.27, abs=0.01)
    assert distance.noise(before).sqnr_db == pytest.approx(40, abs=1)
    assert distance.noise(after).sqnr_db == pytest.approx(9, abs=1)


def test_zeros_cost_nothing_and_count_as_elements() -> None:
    values = np.concatenate([np.zeros(900), np.full(100, 200.25)])
    spread = spread_of(values, FINE)
    assert distance.saturation(spread) == pytest.approx(0.1)
    assert quantile(spread, 0.89) == 0
    assert absmax(spread) == pytest.approx(200, rel=0.02)
    assert distance.noise(spread).sqnr_db == pytest.approx(brute_sqnr_db(values), abs=0.1)


def test_nothing_and_zeros_only() -> None:
    for spread in (Spread(FINE, np.zeros(FINE.size - 1), 0.0), Spread(FINE, np.zeros(FINE.size - 1), 9.0)):
        assert distance.noise(spread).sqnr_db == distance.MOST_DB
        assert distance.saturation(spread) == 0
        assert distance.under_use(spread) == math.inf
        assert distance.wasserstein(spread, spread) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.2, 3), st.floats(-20, 20))
def test_wasserstein_is_scipys(seed: int, factor: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    first = rng.normal(0, 20, 3000)
    second = np.where(rng.random(2000) < 0.2, 0.0, rng.normal(shift, 20 * factor, 2000))
    expected = stats.wasserstein_distance(first, second)
    found = distance.wasserstein(spread_of(first, FINE), spread_of(second, FINE))
    assert found == pytest.approx(expected, abs=0.15)


def test_wasserstein_of_a_shift_is_the_shift() -> None:
    first, second = from_cdf(stats.norm(0, 20).cdf), from_cdf(stats.norm(7, 20).cdf)
    assert distance.wasserstein(first, second) == pytest.approx(7, abs=0.01)
    assert distance.wasserstein(second, first) == pytest.approx(7, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.5, 100))
def test_magnitudes_of_signed_counts(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(scale / 5, scale, 2000)
    folded = spread_of(values, FINE).magnitudes()
    direct = spread_of(np.abs(values), folded.edges)
    np.testing.assert_allclose(folded.counts, direct.counts, atol=1e-6)
    assert quantile(folded, 0.99) == pytest.approx(np.quantile(np.abs(values), 0.99), rel=0.05, abs=0.6)


def test_psi_and_jensen_shannon_by_definition() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.normal(0, 20, 5000), rng.normal(5, 40, 4000)
    edges = [
        -np.inf,
        -127,
        -63.5,
        -31.5,
        -15.5,
        -7.5,
        -3.5,
        -1.5,
        -0.5,
        0.5,
        1.5,
        3.5,
        7.5,
        15.5,
        31.5,
        63.5,
        127,
        np.inf,
    ]
    p, q = (np.histogram(v, edges)[0] + 0.5 for v in (first, second))
    p, q = p / p.sum(), q / q.sum()
    found_p, found_q = distance.code_shares(*(spread_of(v, FINE) for v in (first, second)))
    np.testing.assert_allclose(found_p, p, atol=2e-3)
    assert distance.psi(found_p, found_q) == pytest.approx(np.sum((p - q) * np.log(p / q)), rel=0.02)
    expected = jensenshannon(p, q, base=2) ** 2
    assert distance.jensen_shannon(found_p, found_q) == pytest.approx(expected, rel=0.02)


def test_psi_and_jensen_shannon_of_equal_data_are_small_and_of_others_large() -> None:
    """Equal laws: PSI is about (1/n + 1/m) chi2(bins - 1), in the mean (bins - 1) (1/n + 1/m)."""
    rng = np.random.default_rng(0)
    edges = np.arange(-600, 600.5, 0.5)
    found = []
    for _ in range(100):
        shares = distance.code_shares(*(spread_of(rng.normal(0, 60, 1500), edges) for _ in range(2)))
        found.append(distance.psi(*shares))
    filled = 16  # bins of the signed octaves that hold values; the two clipped ones hold few
    assert np.mean(found) == pytest.approx(filled * 2 / 1500, rel=0.3)
    shares = distance.code_shares(*(spread_of(rng.normal(0, s, 1500), edges) for s in (60, 80)))
    assert distance.psi(*shares) > 5 * np.mean(found)
    assert distance.jensen_shannon(shares[0], shares[0]) == pytest.approx(0, abs=1e-12)


def test_dead_codes() -> None:
    values = np.repeat(np.arange(-127, 128), 5).astype(float)
    half = values[values >= 0]
    edges = np.arange(-128, 128.25, 0.25)
    before, now = spread_of(values, edges), spread_of(half, edges)
    assert distance.dead_codes(before, now) == pytest.approx(127 / 255)
    assert distance.dead_codes(before, before) == 0
    assert distance.dead_codes(now, before) == 0


def test_channels_that_came_alive() -> None:
    calibration = np.array([0.0, 0.4, 30.0, 0.6])
    production = np.array([5.0, 0.8, 90.0, 9.0])
    assert distance.channels_alive(calibration, production).tolist() == [0]
    assert distance.channels_alive(production, production).size == 0


def test_no_figure_grows_with_the_number_of_elements() -> None:
    law = stats.norm(3, 50).cdf
    small, large = from_cdf(law, elements=1e4), from_cdf(law, elements=1e9)
    for figure in (
        distance.saturation,
        distance.overflow,
        distance.under_use,
        lambda s: distance.noise(s).sqnr_db,
    ):
        assert figure(small) == pytest.approx(figure(large), rel=1e-9)
    assert distance.wasserstein(small, large) == pytest.approx(0, abs=1e-9)


def test_spreads_join_and_rescale() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(0, 20, 1000), rng.normal(0, 60, 1000)
    one, two = spread_of(first, FINE), spread_of(second, FINE[::2])
    both = joined([one, two])
    assert both.elements == pytest.approx(2000)
    expected = np.histogram(np.concatenate([first, second]), [-50, 0, 50])[0]
    np.testing.assert_allclose(counts_between(both, np.array([-50.0, 0, 50])), expected, atol=8)
    assert quantile(one.scaled(3), 0.9) == pytest.approx(3 * quantile(one, 0.9))


def interval(clipped: np.ndarray, elements: np.ndarray) -> tuple[float, float]:
    squares = (np.sum(clipped**2), np.sum(clipped * elements), np.sum(elements**2))
    variance = ratio_variance((clipped.sum(), elements.sum()), squares, clipped.size)
    return share_interval(clipped.sum() / elements.sum(), variance, clipped.size)


def test_shares_of_requests() -> None:
    """With 0/1 requests it is Wilson's interval; with equal shares it closes around the share."""
    found = interval(np.repeat([1.0, 0.0], [10, 90]), np.ones(100))
    expected = stats.binomtest(10, 100).proportion_ci(method="wilson")
    assert found == pytest.approx((expected.low, expected.high), abs=2e-3)
    low, high = interval(np.zeros(50), np.full(50, 1e6))
    assert low == 0
    assert high == pytest.approx(stats.binomtest(0, 50).proportion_ci(method="wilson").high)
    low, high = interval(200 + np.tile([1.0, -1.0], 25), np.full(50, 1000.0))
    assert high - low < 0.002
    assert share_interval(0.5, math.inf, 1) == (0.0, 1.0)


def test_more_elements_of_as_many_requests_are_no_more_evidence() -> None:
    clipped = np.repeat([3.0, 0.0], [5, 35])
    few, many = interval(clipped, np.full(40, 100.0)), interval(1000 * clipped, np.full(40, 1e5))
    assert few == pytest.approx(many)


def test_the_interval_covers_the_share_of_skewed_requests() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(300):
        elements = rng.integers(500, 1500, 60).astype(float)
        shares = np.where(rng.random(60) < 0.3, rng.beta(1, 20, 60), 0.0)
        low, high = interval(shares * elements, elements)
        covered += low <= 0.3 / 21 <= high
    assert covered >= 0.88 * 300


def test_the_variance_of_a_ratio_by_simulation() -> None:
    rng = np.random.default_rng(6)

    def draw() -> tuple[float, float]:
        below = rng.gamma(4, 1, 200)
        above = below * rng.gamma(2, 0.1, 200)
        squares = (np.sum(above**2), np.sum(above * below), np.sum(below**2))
        sums = (above.sum(), below.sum())
        return sums[0] / sums[1], ratio_variance(sums, squares, 200)

    ratios, variances = np.array([draw() for _ in range(500)]).T
    assert np.mean(variances) == pytest.approx(np.var(ratios), rel=0.15)


def test_a_ratio_that_rests_on_one_request_has_no_lower_end() -> None:
    above, below = np.array([9.0, *np.zeros(39)]), np.ones(40)
    squares = (np.sum(above**2), np.sum(above * below), np.sum(below**2))
    assert ratio_low(9 / 40, ratio_variance((9.0, 40.0), squares, 40)) == 0


def test_how_many_requests_a_range_needs() -> None:
    rng = np.random.default_rng(2)
    tight, heavy = rng.uniform(9, 10, 200), rng.pareto(1.0, 200) + 1
    assert requests_needed(tight, 0.1) == 1
    assert requests_needed(heavy, 0.1) is None
    number = requests_needed(rng.uniform(0, 10, 400), 0.1)
    assert number is not None
    low, high = (0.025 ** (1 / number), 0.975 ** (1 / number))  # of a uniform law
    assert 1 - low / high <= 0.12
    assert requests_needed([], 0.1) is None


def test_the_range_interval_by_simulation() -> None:
    rng = np.random.default_rng(4)
    sample = rng.gumbel(10, 2, 5000)
    maxima = rng.choice(sample, (4000, 20)).max(axis=1)
    low, high = range_interval(list(sample), 20)
    assert (low, high) == pytest.approx(tuple(np.quantile(maxima, [0.025, 0.975])), rel=0.02)
