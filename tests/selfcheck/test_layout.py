"""Layout faults planted in real-looking tensors, by NumPy's own transposes and rolls; noise stays silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diag.compare.layout import fingerprint

Array = NDArray[Any]

RNG = np.random.default_rng(11)


def tensor(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def noisy(array: Array, share: float = 5e-4) -> Array:
    return (array + share * RNG.standard_normal(array.shape)).astype(np.float32)


def row_by_row(array: Array) -> Array:
    """Row b rolled by b: what batch 2 of an attention block showed (NVIDIA/TensorRT#4853)."""
    return np.stack([np.roll(row.reshape(-1), b).reshape(row.shape) for b, row in enumerate(array)])


HEADS = (2, 4, 6, 8)

MOVES: dict[str, tuple[tuple[int, ...], Callable[[Array], Array], str]] = {
    "heads and tokens exchanged": (HEADS, lambda a: a.transpose(0, 2, 1, 3).reshape(HEADS), "transpose"),
    "channels last": ((2, 3, 8, 8), lambda a: a.transpose(0, 2, 3, 1).reshape(a.shape), "transpose"),
    "untransposed buffer": ((19, 31), lambda a: a.reshape(31, 19).T, "reshape"),
    "rank 5": ((2, 3, 4, 2, 5), lambda a: a.transpose(0, 1, 4, 3, 2).reshape(a.shape), "transpose"),
    "heads inside an axis": (
        (2, 5, 24),
        lambda a: a.reshape(2, 5, 4, 6).transpose(0, 2, 1, 3).reshape(a.shape),
        "transpose",
    ),
    "rolled columns": ((16, 32), lambda a: np.roll(a, 5, axis=1), "roll"),
    "a long axis": ((2, 5000), lambda a: np.roll(a, 1234, axis=1), "roll"),
    "batch offset": ((8, 64), lambda a: np.roll(a, -1, axis=0), "rows"),
    "rows exchanged": ((4, 64), lambda a: a[[0, 2, 1, 3]], "rows"),
    "row 0 for all": ((4, 64), lambda a: np.broadcast_to(a[:1], a.shape), "rows"),
    "row b by b": ((4, 6, 16), row_by_row, "row_roll"),
}


@pytest.mark.parametrize("name", MOVES)
def test_moved_values_are_explained(name: str) -> None:
    shape, move, kind = MOVES[name]
    reference = tensor(*shape)
    found = fingerprint(reference, noisy(move(reference)))
    assert found is not None
    assert found.kind == kind
    assert found.rel_l2 > 0.5
    assert found.explained_rel_l2 < 0.005


@pytest.mark.parametrize("name", MOVES)
def test_the_noise_alone_is_silent(name: str) -> None:
    shape, _, _ = MOVES[name]
    reference = tensor(*shape)
    assert fingerprint(reference, noisy(reference, 0.03)) is None  # INT8's size
    assert fingerprint(reference, noisy(reference, 0.2), noise_rel_l2=0.2) is None


def test_the_words_name_the_axes() -> None:
    reference = tensor(*HEADS)
    found = fingerprint(reference, reference.transpose(0, 2, 1, 3).reshape(HEADS))
    assert found is not None
    assert "transposed by (0, 2, 1, 3)" in found.text
    assert found.sorted_rel_l2 == 0


def test_row_by_row_is_told_from_its_law() -> None:
    found = fingerprint(reference := tensor(4, 96), row_by_row(reference))
    assert found is not None
    assert "row b of the batch is rolled by 1 times b" in found.text
    assert "3 of 4 rows (1, 2, 3)" in found.text
    assert found.parameters["shifts"] == [0, 1, 2, 3]


@pytest.mark.parametrize("third", [0, 1, 2])
def test_strided_view_read_as_dense(third: int) -> None:
    """A third of a wider buffer read as if it were contiguous (NVIDIA/TensorRT#4854)."""
    positions, channels = 64, 32
    buffer = tensor(positions, 3 * channels)
    reference = buffer[:, third * channels : (third + 1) * channels]
    start = third * channels
    candidate = buffer.reshape(-1)[start : start + positions * channels].reshape(positions, channels)
    right = int((np.abs(candidate - reference).max(axis=1) == 0).sum())
    assert right == 1  # as reported: 1 of 64 rows

    found = fingerprint(reference, noisy(candidate))
    assert found is not None
    assert found.kind == "stride"
    assert found.parameters["stride"] == 3 * channels
    assert found.parameters["row"] == channels
    assert "strided view was read as dense" in found.text


def test_dense_read_with_another_stride() -> None:
    whole = tensor(40 * 48)
    reference = whole[: 40 * 32].reshape(40, 32)
    candidate = np.stack([whole[i * 48 : i * 48 + 32] for i in range(40)])
    found = fingerprint(reference, candidate)
    assert found is not None
    assert found.kind == "stride"
    assert found.parameters["stride"] == 48
    assert "read with another stride" in found.text


def test_unexplained_places_are_said_so() -> None:
    reference = tensor(40, 50)
    shuffled = RNG.permutation(reference.reshape(-1)).reshape(reference.shape)
    found = fingerprint(reference, shuffled)
    assert found is not None
    assert found.kind == "values_moved"


@pytest.mark.parametrize("shape", [(64,), (40, 50), (3, 70, 80), (2, 3, 40, 50)])
def test_other_values_of_the_same_distribution_are_not_moved_ones(shape: tuple[int, ...]) -> None:
    assert fingerprint(tensor(*shape), tensor(*shape)) is None


def test_constants_zeros_and_lost_values() -> None:
    assert fingerprint(np.ones((4, 8), np.float32), np.ones((4, 8), np.float32)) is None
    assert fingerprint(np.zeros((4, 8), np.float32), tensor(4, 8)) is None
    assert fingerprint(tensor(4, 8), np.zeros((4, 8), np.float32)) is None
    assert fingerprint(tensor(4, 8), np.full((4, 8), np.nan, np.float32)) is None


def test_large_tensors_take_no_long_time() -> None:
    reference = tensor(1, 64, 16384)
    began = time.monotonic()
    assert fingerprint(reference, tensor(1, 64, 16384)) is None
    assert time.monotonic() - began < 20


def test_a_gain_is_no_move() -> None:
    reference = tensor(16, 16)
    assert fingerprint(reference, 1.5 * reference) is None
    assert fingerprint(reference, -reference) is None


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        fingerprint(tensor(2, 3), tensor(3, 2))
