"""Statistics add up exactly: any split of the requests, any order, through files or not, the same bytes."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diag.drift.accumulate import count_batch, requests_of
from diag.drift.bins import BINS, EDGES
from diag.drift.merge import merge
from diag.drift.merge_files import merge_files
from diag.drift.stats import SAMPLED, WORST, Stats, Tensor, empty_stats
from diag.drift.stats_file import read_stats, stats_bytes, write_stats
from diag.errors import StatsError, UsageError
from diag.numerics.exact import ExactSums

TENSORS = (
    Tensor("x", "input", 2.0, "table"),
    Tensor("y", "activation", 1e-3, "table"),
    Tensor("n", "output", 127.0, "unit"),
)
EMPTY = empty_stats("a" * 64, "b" * 64, TENSORS)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.just(5)), elements=FLOATS)


def counted(x: np.ndarray, labels: list[str]) -> Stats:
    with np.errstate(over="ignore", invalid="ignore"):
        values = {"x": x, "y": x[:, :3] * np.float32(0.01), "n": np.arange(2 * len(x)).reshape(len(x), 2)}
    return count_batch(EMPTY, values, requests_of({"x": x}, labels), axes={"x": -1})


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(), st.data())
def test_any_split_in_any_order_writes_the_same_bytes(tmp_path_factory, x, random, data):
    """`n` holds the number of a request, so that its values do not depend on the split."""
    labels = [f"r{i}" for i in range(len(x))]
    single = [
        count_batch(
            EMPTY,
            {"x": x[i : i + 1], "y": x[i : i + 1, :3], "n": np.array([[i, -i]])},
            requests_of({"x": x[i : i + 1]}, [labels[i]]),
            axes={"x": -1},
        )
        for i in range(len(x))
    ]
    expected = stats_bytes(merge(single))
    random.shuffle(single)
    groups: dict[int, list[Stats]] = {}
    for part in single:
        groups.setdefault(data.draw(st.integers(0, 2)), []).append(part)
    folder = tmp_path_factory.mktemp("stats")
    for number, group in groups.items():
        write_stats(merge(group), folder / f"{number}")
    assert stats_bytes(merge_files(sorted(folder.iterdir()))) == expected


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 12))
def test_how_requests_are_put_into_batches_leaves_no_trace(x, cut):
    """Two batches or one: only the number of batches differs."""
    cut = min(cut, len(x))
    labels = [f"r{i}" for i in range(len(x))]

    def count(part: slice) -> Stats:
        values = {"x": x[part], "y": x[part, :3], "n": np.zeros((len(x[part]), 2), np.int64)}
        return count_batch(EMPTY, values, requests_of({"x": x[part]}, labels[part]))

    parts = [count(part) for part in (slice(0, cut), slice(cut, None)) if len(x[part])]
    whole, joined = count(slice(None)), merge(parts)
    assert joined.source.requests == whole.source.requests == len(x)
    joined = dataclasses.replace(joined, source=dataclasses.replace(joined.source, batches=1))
    assert stats_bytes(joined) == stats_bytes(whole)


@pytest.mark.parametrize("width", [7, 1000, 20_000, 40_000])
def test_short_and_long_requests_are_independent_of_their_neighbours(width):
    x = np.random.default_rng(width).standard_t(3, (5, width)).astype(np.float32)
    one = (Tensor("x", "input", 4.0, "table"),)
    like = empty_stats("a" * 64, None, one)
    whole = count_batch(like, {"x": x}, requests_of({"x": x}, list("abcde")))
    parts = [count_batch(like, {"x": x[[i]]}, requests_of({"x": x[[i]]}, ["abcde"[i]])) for i in range(5)]
    joined = merge(parts)
    assert joined.moments.digits.tobytes() == whole.moments.digits.tobytes()
    np.testing.assert_array_equal(joined.counts, whole.counts)
    np.testing.assert_array_equal(joined.worst, whole.worst)


def many(requests: int, seed: int = 0) -> Stats:
    x = np.random.default_rng(seed).normal(size=(requests, 5)).astype(np.float32)
    return counted(x, [f"{seed}/{i}" for i in range(requests)])


def test_the_sample_is_the_smallest_keys_and_the_worst_are_the_worst():
    parts = [many(50, seed) for seed in range(4)]
    whole = merge(parts)
    keys = sorted(int(k) for p in parts for k in p.labels)
    assert whole.sample_keys.tolist() == sorted({*keys})[:SAMPLED]
    xs = {
        f"{s}/{i}": row
        for s in range(4)
        for i, row in enumerate(np.random.default_rng(s).normal(size=(50, 5)).astype(np.float32))
    }
    damage = {name: noise_share(row.astype(np.float64), 2.0) for name, row in xs.items()}
    expected = sorted(damage, key=lambda name: -damage[name])[:WORST]
    assert [label for label, _ in whole["x"].worst] == expected
    assert set(whole.labels) == {*whole.sample_keys.tolist(), *whole.worst_keys.reshape(-1).tolist()}


def noise_share(row: np.ndarray, limit: float) -> float:
    step = limit / 127
    quantized = np.clip(np.rint(row / step), -127, 127) * step
    return float(((row - quantized) ** 2).sum() / (row**2).sum())


def test_others_are_refused():
    mine = many(3)
    other = dataclasses.replace(mine, model_sha256="c" * 64)
    with pytest.raises(StatsError, match=r"another model \(cccccccccccc\.\.\.\)"):
        merge([mine, other])
    with pytest.raises(StatsError, match=r"another calibration table \(none\)"):
        merge([mine, dataclasses.replace(mine, table_sha256=None)])
    scaled = dataclasses.replace(TENSORS[1], range=2e-3)
    with pytest.raises(StatsError, match="'y' with another scale"):
        merge([mine, dataclasses.replace(mine, tensors=(TENSORS[0], scaled, TENSORS[2]))])
    renamed = dataclasses.replace(TENSORS[1], name="z")
    with pytest.raises(StatsError, match=r"other tensors .* 'z'"):
        merge([mine, dataclasses.replace(mine, tensors=(TENSORS[0], renamed, TENSORS[2]))])
    with pytest.raises(StatsError, match="no statistics"):
        merge([])


def test_the_same_twice_is_refused(tmp_path):
    for name in "ab":
        write_stats(many(3), tmp_path / name)
    with pytest.raises(StatsError, match="hold the same requests"):
        merge_files([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UsageError):
        merge_files([])


def test_a_file_that_is_cut_off_or_changed_is_refused(tmp_path):
    file = tmp_path / "stats"
    write_stats(many(20), file)
    body = file.read_bytes()
    assert stats_bytes(read_stats(file)) == body
    for length in (0, 1, 10, len(body) // 2, len(body) - 1):
        file.write_bytes(body[:length])
        with pytest.raises(StatsError) as error:
            read_stats(file)
        assert str(file) in str(error.value) and "trtdiag profile" in str(error.value)
    with pytest.raises(StatsError, match="cannot be read"):
        read_stats(tmp_path / "absent")
    random = np.random.default_rng(0)
    for _ in range(150):
        place = int(random.integers(len(body)))
        changed = bytearray(body)
        changed[place] ^= int(random.integers(1, 256))
        file.write_bytes(bytes(changed))
        with suppress(StatsError):  # bytes that zip does not use may change
            read_stats(file)


def test_no_pickle_is_read(tmp_path):
    file = tmp_path / "stats.npz"
    np.savez(file, header=np.array([print], dtype=object))
    with pytest.raises(StatsError, match="damaged"):
        read_stats(file)


def test_an_archive_of_something_else_is_named_as_such(tmp_path):
    file = tmp_path / "batch.npz"
    np.savez(file, input_ids=np.zeros((1, 4), np.int64))
    with pytest.raises(StatsError, match=r"holds no trtdiag.stats/1 statistics: there is no array 'header'"):
        read_stats(file)


def test_the_file_is_an_archive_that_numpy_reads(tmp_path):
    write_stats(many(20), tmp_path / "stats.npz")
    with np.load(tmp_path / "stats.npz", allow_pickle=False) as archive:
        assert archive["header"].tobytes().startswith(b'{"schema":"trtdiag.stats/1"')
        assert archive["extremes"].shape == (3, 2, 2)


def test_channels_add_up(tmp_path):
    parts = [many(4, seed) for seed in range(3)]
    write_stats(merge(parts), tmp_path / "s")
    found = read_stats(tmp_path / "s")["x"].channels
    x = np.concatenate([np.random.default_rng(s).normal(size=(4, 5)).astype(np.float32) for s in range(3)])
    np.testing.assert_array_equal(found.absmax, np.abs(x).max(axis=0))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found.sums.floats(), [*wide.sum(axis=0), *(wide**2).sum(axis=0)], rtol=1e-12)
    assert found.elements == 12


@pytest.mark.parametrize("deviation", [16, 32])
def test_a_file_of_500_tensors_stays_small(deviation):
    """500 tensors whose values fill the range, each counted 10^8 times."""
    tensors = tuple(Tensor(f"/layers.{i}/MatMul_output_0", "activation", 5.0, "table") for i in range(500))
    random = np.random.default_rng(0)
    middle = (EDGES[1:] + EDGES[:-1]) / 2
    shares = np.exp(-((middle / deviation) ** 2) / 2) * np.diff(EDGES)
    counts = random.poisson(5e7 * shares / shares.sum(), (500, 2, BINS))
    keys = np.arange(64, dtype=np.uint64)
    stats = dataclasses.replace(
        empty_stats("a" * 64, None, tensors),
        counts=counts,
        sample_keys=keys,
        sample=random.normal(size=(500, 64, 3)).astype(np.float32),
        worst_keys=random.integers(0, 64, (500, 8)).astype(np.uint64),
        worst=random.random((500, 8)).astype(np.float32),
        moments=ExactSums.of(random.lognormal(20, 3, (500 * 2 * 14, 5))),
        labels={key: f"production/{key:06d}.npz" for key in range(64)},
    )
    assert len(stats_bytes(stats)) < 2e6
