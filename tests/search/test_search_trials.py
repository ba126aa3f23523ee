"""Trials of one variant on one batch: they add up, start where runs differ, and survive on disk."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from search_tools import Workplace, workplace

from diag.compare.record import Record
from diag.numerics.measured import TensorKind
from diag.pipeline.search.outcome import Outcome, metrics_of
from diag.pipeline.search.setup import Search, set_up
from diag.pipeline.search.trials import TrialStore
from diag.pipeline.search.user_metric import OwnSums
from diag.progress import Silent

LOGITS = TensorKind("logits", noise=0.01)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return workplace(tmp_path_factory.mktemp("trials"), family="llama")


@pytest.fixture(scope="module")
def search(place: Workplace) -> Search:
    return set_up(place.settings(), Silent())


def pairs(batches: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    made = []
    for number in range(batches):
        reference = generator.normal(size=(2, 5, 7)).astype(np.float32)
        made.append((reference, reference + np.float32(0.1 * (number + 1)) * np.sign(reference)))
    return made


def outcome(number: int, reference: np.ndarray, candidate: np.ndarray) -> Outcome:
    record = Record.of(LOGITS)
    record.update(number, reference, candidate)
    return Outcome({"y": record}, OwnSums("mine", 0.5 * len(reference), 1.0 * len(reference), len(reference)))


def test_metrics_of_parts_are_those_of_the_whole() -> None:
    whole = Record.of(LOGITS)
    for number, pair in enumerate(pairs(4)):
        whole.update(number, *pair)
    found = metrics_of((outcome(n, *pair) for n, pair in enumerate(pairs(4))), by_channel=True)
    assert found["y"] == whole.metrics()
    assert found["(own metric)"] == {"mine": 0.5, "reference": 1.0}


def test_the_worst_batch_is_that_of_the_largest_error() -> None:
    parts = [outcome(n, *pair) for n, pair in enumerate(pairs(3))]
    reference, candidate = pairs(3)[2]
    expected = 10 * math.log10((reference**2).sum() / ((candidate - reference) ** 2).sum())
    assert metrics_of(parts, True)["y"]["worst_batch_sqnr_db"] == pytest.approx(expected, abs=1e-3)


def test_without_channels_every_other_metric_stays() -> None:
    full = metrics_of([outcome(0, *pairs(1)[0])], True)["y"]
    slim = metrics_of([outcome(0, *pairs(1)[0]).without_channels()], False)["y"]
    assert "channel_min_sqnr_db" in full
    assert slim == pytest.approx({k: v for k, v in full.items() if k != "channel_min_sqnr_db"})


def test_what_is_written_down_is_read_bit_for_bit(tmp_path: Path) -> None:
    reference, candidate = pairs(1)[0]
    candidate[0, 0, 0] = np.inf
    kept = outcome(0, reference, candidate)
    store = TrialStore(tmp_path / "trials.sqlite", "key")
    store.keep(frozenset("ab"), 0, kept)
    again = TrialStore(tmp_path / "trials.sqlite", "key").find(frozenset("ba"), 0)
    assert again is not None
    assert again.dump() == kept.dump()
    assert str(metrics_of([again], True)) == str(metrics_of([kept], True))
    assert TrialStore(tmp_path / "trials.sqlite", "another").find(frozenset("ab"), 0) is None
    assert store.find(frozenset("ab"), 1) is None


def test_a_run_that_starts_from_another_is_the_whole_run(place: Workplace, search: Search) -> None:
    generator = np.random.default_rng(11)
    names = sorted(search.low())
    fresh = set_up(place.settings("fresh"), Silent())
    for _ in range(12):
        low = frozenset(n for n in names if generator.random() < 0.5)
        followed = search.variants.outcome(low, 1)
        whole = fresh.variants._switchable.trace(fresh.variants._batches[1], low).outputs
        reference = fresh.variants._switchable.trace(fresh.variants._batches[1], ()).outputs
        for name, record in followed.records.items():
            error = whole[name].astype(np.float64) - reference[name]
            assert record.sums.error_square.sum() == pytest.approx(np.square(error).sum(), rel=1e-5)


def test_followed_runs_cost_less_than_whole_ones(place: Workplace) -> None:
    variants = set_up(place.settings("cost"), Silent()).variants
    names = sorted(variants._switchable.switches, key=lambda n: variants._switchable._place[n])
    variants.outcome(frozenset(), 0)
    assert variants.forward_equivalents == pytest.approx(1.0)
    variants.outcome(frozenset(names[-1:]), 0)
    last = variants.forward_equivalents - 1.0
    variants.outcome(frozenset(names[:1]), 0)
    first = variants.forward_equivalents - 1.0 - last
    assert last < 0.5 < first <= 1.0


def test_memory_for_runs_is_bounded_and_changes_no_number(place: Workplace) -> None:
    wide, narrow = (set_up(place.settings(out), Silent()).variants for out in ("wide", "narrow"))
    narrow._traces._most_bytes = 0
    names = sorted(wide._switchable.switches)
    for name in [*names[:6], *names[:3]]:
        for batch in (0, 1):
            low = frozenset(names) - {name}
            assert narrow.outcome(low, batch).dump() == wide.outcome(low, batch).dump()
    assert len(narrow._traces._kept) <= 3 < len(wide._traces._kept)
