"""A miss proven by some batches is a miss of all: the shortcut never changes an answer."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from search_tools import Workplace, workplace

from diag.pipeline.search.early import _best, missed_early
from diag.pipeline.search.setup import Search, set_up
from diag.progress import Silent

TARGETS = ["sqnr_db>=20", "rel_l2<=0.1", "cosine>=0.999", "kl<=0.001", "top1>=0.9"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workplace]:
    return {family: workplace(tmp_path_factory.mktemp(family), family=family) for family in ("vit", "llama")}


def opened(place: Workplace, target: str) -> Search:
    return set_up(place.settings(f"out-{target[:4]}", target), Silent())


@pytest.mark.parametrize("target", TARGETS)
def test_what_some_batches_prove_all_batches_confirm(target: str, places: dict[str, Workplace]) -> None:
    search = opened(places["llama" if target[:2] in ("kl", "to") else "vit"], target)
    generator, proven, held = np.random.default_rng(5), 0, 0
    names = [c.id for c in search.candidates]
    for share in np.linspace(0.0, 1.0, 25):
        ids = frozenset(n for n in names if generator.random() < share)
        met = search.target.met(search.variants.metrics(search.low(ids), range(4)))
        early = missed_early(search, ids, range(4))
        assert not (early and met)
        proven, held = proven + early, held + met
    assert proven > 0
    assert held > 0


def test_one_batch_proves_nothing_more_than_itself(places: dict[str, Workplace]) -> None:
    assert not missed_early(opened(places["vit"], "sqnr_db>=20"), frozenset(), (0,))


def test_a_metric_that_does_not_add_up_proves_nothing(places: dict[str, Workplace]) -> None:
    assert not missed_early(opened(places["vit"], "max_abs<=1e-9"), frozenset(), range(4))


def test_no_rest_reaches_a_larger_cosine_than_the_bound() -> None:
    """Against the best of many random ways to fill the rest, and the closed form's own maximum."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        first, rest = generator.normal(size=6), generator.normal(size=5)
        seen = first + generator.normal(size=6) * generator.uniform(0, 2)
        cosine = float(first @ seen / np.linalg.norm(first) / np.linalg.norm(seen))
        share = float(first @ first / (first @ first + rest @ rest))
        bound = _best(cosine, share)
        reference = np.concatenate([first, rest])

        def reached(tail: np.ndarray, seen: np.ndarray = seen, reference: np.ndarray = reference) -> float:
            whole = np.concatenate([seen, tail])
            return float(reference @ whole / np.linalg.norm(reference) / np.linalg.norm(whole))

        scales = np.geomspace(1e-3, 1e3, 4000)
        best = max(reached(scale * rest) for scale in scales)
        assert all(reached(generator.normal(size=5) * 3) <= bound + 1e-9 for _ in range(200))
        assert best <= bound + 1e-9
        assert math.isclose(best, bound, abs_tol=1e-3)


def test_the_shortcut_saves_runs(tmp_path: Path) -> None:
    search = set_up(workplace(tmp_path, family="vit").settings(), Silent())
    for batch in range(4):
        search.variants.outcome(search.low(), batch)
    before = search.variants.trials
    nearly = frozenset(list(search.ids)[:1])
    assert missed_early(search, nearly, range(4))
    assert search.variants.trials - before < 4
