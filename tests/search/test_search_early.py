"""A miss proven by one batch is a miss of all: the shortcut never changes an answer."""

from __future__ import annotations

import numpy as np
import pytest
from search_tools import workplace

from diag.pipeline.search.early import missed_by_one
from diag.pipeline.search.setup import Search, set_up
from diag.progress import Silent


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    place = workplace(tmp_path_factory.mktemp("early"), family="vit")
    return set_up(place.settings(), Silent())


def test_what_one_batch_proves_all_batches_confirm(search: Search) -> None:
    generator, proven = np.random.default_rng(5), 0
    names = [c.id for c in search.candidates]
    for _ in range(25):
        ids = frozenset(n for n in names if generator.random() < 0.5)
        if missed_by_one(search, ids, range(4)):
            proven += 1
            assert not search.target.met(search.variants.metrics(search.low(ids), range(4)))
    assert 0 < proven < 25


def test_one_batch_proves_nothing_more_than_itself(search: Search) -> None:
    assert not missed_by_one(search, frozenset(), (0,))
