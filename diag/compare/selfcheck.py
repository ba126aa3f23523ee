"""Tests of an engine against itself: they need no reference, and what they find is no matter of precision.

A network treats the rows of a batch alike and apart. So identical rows give identical outputs, permuted rows
permuted outputs, one row the same alone as in company, and the same call twice the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Feed = Mapping[str, Array]
Run = Callable[[Feed], Mapping[str, Array]]

Test = Literal["same_call", "identical_rows", "permuted_rows", "one_by_one", "other_sizes"]
Status = Literal["agrees", "contradiction", "model", "not_run"]
"""`model`: the reference contradicts itself likewise, so the model itself mixes rows."""

TESTS: tuple[Test, ...] = ("same_call", "identical_rows", "permuted_rows", "one_by_one", "other_sizes")

_WORDS: Mapping[Test, str] = {
    "same_call": "the same call twice gives different values",
    "identical_rows": "identical rows of one batch give different outputs",
    "permuted_rows": "the order of the rows changes their outputs",
    "one_by_one": "a row alone gives another output than in its batch",
    "other_sizes": "a row's output depends on the size of its batch",
}
_ROWS_ALONE = 8
"""So many rows are run one by one."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Outcome of one test on one output."""

    test: Test
    output: str
    status: Status
    rel_l2: float = 0.0
    """Size of the contradiction: norm of the difference over norm of what it is measured against."""
    max_abs: float = 0.0
    row: int = -1
    """Row of the largest difference, -1 where there is none."""
    tolerance_rel_l2: float = 0.0
    reference_rel_l2: float | None = None
    """The same test on the reference; None where it was not needed."""
    reason: str = ""
    """Why it was not run."""

    @property
    def text(self) -> str:
        if self.status == "not_run":
            return f"{self.test} was not run on {self.output}: {self.reason}"
        if self.status == "agrees":
            return f"{self.test}: {self.output} agrees with itself (relative L2 {self.rel_l2:.2g})"
        size = f"relative L2 {self.rel_l2:.2g}, tolerance {self.tolerance_rel_l2:.2g}"
        if self.status == "model":
            return f"{_WORDS[self.test]} ({self.output}, {size}), in the reference too: the model mixes rows"
        return f"{_WORDS[self.test]}: {self.output}, row {self.row}, {size}"


@dataclass(frozen=True, slots=True)
class _Difference:
    rel_l2: float
    max_abs: float
    row: int


def self_checks(
    run: Run,
    feed: Feed,
    *,
    tolerance_rel_l2: float,
    reference: Run | None = None,
    sizes: Sequence[int] = (),
    tests: Sequence[Test] = TESTS,
) -> list[SelfCheck]:
    """Run the tests on one batch; one outcome for each test and output.

    `tolerance_rel_l2` is what another kernel or order of sums may change (ten unit roundoffs of the widest
    used low format, or the rebuild noise). `reference` clears models that mix rows by nature; it is asked
    only about tests that failed. `sizes` are other batch sizes that the engine takes; 1 among them allows
    rows one by one. An engine that refuses a feed raises what it raises.
    """
    outputs = run(feed)
    size = _batch_size(feed)
    found = []
    for test in tests:
        reason = _impossible(test, size, sizes)
        differences = {} if reason else _differences(test, run, feed, outputs, size, sizes)
        asked: dict[str, _Difference] | None = None
        for name, output in outputs.items():
            if name not in differences:
                why = reason or _unfit(output, size)
                found.append(SelfCheck(test, name, "not_run", reason=why))
                continue
            if asked is None and differences[name].rel_l2 > tolerance_rel_l2 and reference is not None:
                asked = _differences(test, reference, feed, reference(feed), size, sizes)
            theirs = asked.get(name) if asked is not None else None
            found.append(_judged(test, name, differences[name], tolerance_rel_l2, theirs))
    return found


def contradictions(checks: Sequence[SelfCheck]) -> list[SelfCheck]:
    """Those that prove a fault, the largest first."""
    proofs = [check for check in checks if check.status == "contradiction"]
    return sorted(proofs, key=lambda check: -check.rel_l2)


def _judged(
    test: Test, name: str, seen: _Difference, tolerance: float, theirs: _Difference | None
) -> SelfCheck:
    status: Status = "agrees" if seen.rel_l2 <= tolerance else "contradiction"
    if status == "contradiction" and theirs is not None and theirs.rel_l2 > tolerance / 2:
        status = "model"
    own = None if theirs is None else theirs.rel_l2
    return SelfCheck(test, name, status, seen.rel_l2, seen.max_abs, seen.row, tolerance, own)


def _batch_size(feed: Feed) -> int:
    """Leading dimension that all inputs share; inputs of one row or none take no part. 0: there is none."""
    leading = {array.shape[0] for array in feed.values() if array.ndim and array.shape[0] > 1}
    if len(leading) == 1:
        return int(leading.pop())
    return 1 if not leading and any(array.ndim for array in feed.values()) else 0


def _impossible(test: Test, size: int, sizes: Sequence[int]) -> str:
    if test == "same_call":
        return ""
    if size == 0:
        return "the inputs share no leading dimension"
    if test in ("identical_rows", "permuted_rows", "one_by_one") and size < 2:
        return "the batch has one row"
    if test == "one_by_one" and 1 not in sizes:
        return "the engine takes no batch of one row"
    if test == "other_sizes" and not _other_sizes(size, sizes):
        return "the engine takes no other batch size" + (" of several rows" if 1 in sizes else "")
    return ""


def _other_sizes(size: int, sizes: Sequence[int]) -> list[int]:
    """Batch sizes to try; one row has a test of its own."""
    return [other for other in sizes if other != size and (other > 1 or size == 1)]


def _unfit(output: Array, size: int) -> str:
    if output.dtype.kind not in "fiub":
        return f"its type {output.dtype} holds no numbers"
    return f"its shape {output.shape} has no rows of the batch of {size}"


def _differences(
    test: Test, run: Run, feed: Feed, outputs: Mapping[str, Array], size: int, sizes: Sequence[int]
) -> dict[str, _Difference]:
    """Worst difference of each output that can be compared."""
    worst: dict[str, _Difference] = {}
    for expected, got in _pairs(test, run, feed, outputs, size, sizes):
        for name, value in got.items():
            if name not in expected or expected[name].shape != value.shape:
                continue
            seen = _difference(expected[name], value)
            if name not in worst or seen.rel_l2 > worst[name].rel_l2:
                worst[name] = seen
    return worst


def _pairs(
    test: Test, run: Run, feed: Feed, outputs: Mapping[str, Array], size: int, sizes: Sequence[int]
) -> Iterator[tuple[Mapping[str, Array], Mapping[str, Array]]]:
    """What a test expects and what it got, by output."""
    if test == "same_call":
        yield outputs, run(feed)
        return
    rows = {n: o for n, o in outputs.items() if o.ndim and o.shape[0] == size and o.dtype.kind in "fiub"}
    if test == "identical_rows":
        same = run(_taken(feed, np.zeros(size, np.int64), size))
        kept = {name: same[name] for name in rows}
        yield {name: np.broadcast_to(value[:1], value.shape) for name, value in kept.items()}, kept
    elif test == "permuted_rows":
        order = np.roll(np.arange(size), 1)
        yield {name: value[order] for name, value in rows.items()}, run(_taken(feed, order, size))
    elif test == "one_by_one":
        for row in _spread(size):
            yield {n: v[row : row + 1] for n, v in rows.items()}, run(_taken(feed, np.array([row]), size))
    else:
        for other in _other_sizes(size, sizes):
            order = np.arange(other) % size
            yield {name: value[order] for name, value in rows.items()}, run(_taken(feed, order, size))


def _spread(size: int) -> list[int]:
    """Rows to run alone, first and last among them."""
    return sorted({round(i) for i in np.linspace(0, size - 1, min(size, _ROWS_ALONE))})


def _taken(feed: Feed, rows: NDArray[np.int64], size: int) -> dict[str, Array]:
    """The feed with these rows; inputs without the batch's leading dimension stay."""
    return {
        name: np.ascontiguousarray(array[rows]) if array.ndim and array.shape[0] == size else array
        for name, array in feed.items()
    }


def _difference(expected: Array, got: Array) -> _Difference:
    """Equal non-finite values agree; a value that is finite on one side only is an infinite difference."""
    want, have = (np.asarray(a, np.float64).reshape(a.shape[0] if a.ndim else 1, -1) for a in (expected, got))
    if want.size == 0:
        return _Difference(0.0, 0.0, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(have - want)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    gap = np.where(same, 0.0, np.where(np.isnan(gap), np.inf, gap))
    largest = float(gap.max())
    if largest == 0:
        return _Difference(0.0, 0.0, -1)
    energy = float(np.sqrt(np.square(np.where(np.isfinite(want), want, 0)).sum()))
    error = float(np.sqrt(np.square(gap).sum()))
    rel = error / energy if energy > 0 else np.inf
    return _Difference(float(rel), largest, int(gap.max(axis=1).argmax()))
