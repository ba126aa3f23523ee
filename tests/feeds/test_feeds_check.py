"""Whether a batch fits the model: names, types, shapes, finite values; each fault has one exact sentence."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from diag.errors import DataError
from diag.feeds.check import checked
from diag.feeds.source import RawBatch
from diag.model.graph import TensorInfo

IMAGE = {"x": TensorInfo(TensorProto.FLOAT, ("batch", 3, None, 2))}


def one(array, elem_type, shape=None):
    """The array as the model's only input receives it."""
    return checked(RawBatch("'f.npz'", {"x": array}), {"x": TensorInfo(elem_type, shape)})["x"]


def refusal(values, inputs):
    with pytest.raises(DataError) as caught:
        checked(RawBatch("'f.npz'", values), inputs)
    return caught.value.problem, caught.value.hint


def image(**changes):
    return {"x": np.zeros((2, 3, 5, 2), np.float32)} | changes


def test_a_good_batch_passes_unchanged():
    values = image()
    assert checked(RawBatch("o", values), IMAGE)["x"] is values["x"]


def test_missing_input_suggests_the_near_name():
    inputs = {"attention_mask": TensorInfo(TensorProto.INT64, None)}
    problem, hint = refusal({"attn_mask": np.ones(2, np.int64)}, inputs)
    assert problem == "'f.npz' lacks the model's input 'attention_mask'"
    assert hint == "Rename 'attn_mask' to 'attention_mask'."


def test_missing_input_with_nothing_near_lists_what_there_is():
    problem, hint = refusal({"q": np.ones(2)}, IMAGE)
    assert problem == "'f.npz' lacks the model's input 'x'"
    assert hint == "It holds 'q'; the model's inputs are 'x'."
    assert refusal({}, IMAGE)[1] == "It holds nothing; the model's inputs are 'x'."


def test_savez_without_names():
    inputs = {"pixel_values": IMAGE["x"]}
    problem, hint = refusal({"arr_0": np.zeros(2)}, inputs)
    assert problem == "'f.npz' lacks the model's input 'pixel_values'"
    assert hint == "np.savez was called without names: use np.savez(path, pixel_values=array)."


def test_extra_input():
    problem, hint = refusal(image(label=np.ones(2)), IMAGE)
    assert problem == "'f.npz' holds 'label', which is no input of the model"
    assert hint == "The model's inputs are 'x'; leave out the rest."


@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 4, 5, 2), (2, 3, 5, 2, 1), ()])
def test_wrong_shape(shape):
    problem, _ = refusal({"x": np.zeros(shape, np.float32)}, IMAGE)
    shown = ", ".join(map(str, shape))
    assert problem == f"'f.npz', input 'x', has shape ({shown}) where the model wants (batch, 3, ?, 2)"


def test_no_rank_known_means_any_shape():
    assert one(np.zeros((2, 7), np.float32), TensorProto.FLOAT).shape == (2, 7)


def test_empty_dimension_is_allowed():
    """A first step with an empty key-value cache is a real input."""
    assert one(np.zeros((1, 0), np.float32), TensorProto.FLOAT, (1, "past")).shape == (1, 0)


def test_one_symbol_one_size():
    inputs = {n: TensorInfo(TensorProto.INT64, ("batch", "seq")) for n in ("ids", "mask")}
    values = {"ids": np.ones((2, 64), np.int64), "mask": np.ones((2, 32), np.int64)}
    problem, _ = refusal(values, inputs)
    assert problem == "'f.npz' has 64 for dimension 'seq' in input 'ids' and 32 in input 'mask'"


@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_non_finite_value_names_its_place(bad, shown):
    array = np.zeros((2, 3, 5, 2), np.float32)
    array[1, 2, 0, 1] = array[1, 2, 4, 1] = bad
    problem, _ = refusal({"x": array}, IMAGE)
    assert problem == (f"'f.npz', input 'x', holds {shown} at (1, 2, 0, 1) (2 of 60 values are not finite)")


def test_float64_that_overflows_float32_is_not_finite():
    problem, _ = refusal({"x": np.full((1, 3, 1, 2), 1e300)}, IMAGE)
    assert problem == "'f.npz', input 'x', holds inf at (0, 0, 0, 0) (6 of 6 values are not finite)"


@pytest.mark.parametrize(
    ("array", "elem_type", "expected"),
    [
        (np.array([0.1]), TensorProto.FLOAT, np.float32(0.1)),
        (np.array([0.5], np.float16), TensorProto.FLOAT, np.float32(0.5)),
        (np.array([0.5], np.float32), TensorProto.FLOAT16, np.float16(0.5)),
        (np.array([1.5], np.float32), TensorProto.BFLOAT16, ml_dtypes.bfloat16(1.5)),
        (np.array([7], np.int32), TensorProto.INT64, np.int64(7)),
        (np.array([7], np.int64), TensorProto.INT32, np.int32(7)),
        (np.array([1], np.uint8), TensorProto.BOOL, np.bool_(True)),
        (np.array([True]), TensorProto.INT64, np.int64(1)),
    ],
)
def test_casts_that_hide_nothing(array, elem_type, expected):
    (value,) = one(array, elem_type)
    assert value == expected
    assert value.dtype == expected.dtype


@pytest.mark.parametrize(
    ("array", "elem_type", "types"),
    [
        (np.array([3], np.uint8), TensorProto.FLOAT, ("uint8", "float32")),
        (np.array([1.0], np.float32), TensorProto.INT64, ("float32", "int64")),
        (np.array([0.1], np.float32), TensorProto.FLOAT16, ("float32", "float16")),
        (np.array([1j]), TensorProto.FLOAT, ("complex128", "float32")),
        (np.array(["a"]), TensorProto.FLOAT, ("<U1", "float32")),
        (np.array([1.0]), TensorProto.STRING, ("float64", "string")),
    ],
)
def test_casts_that_would_hide_a_mistake(array, elem_type, types):
    problem, hint = refusal({"x": array}, {"x": TensorInfo(elem_type, None)})
    assert problem == f"'f.npz', input 'x', is {types[0]} where the model wants {types[1]}"
    assert hint == f"Convert it the way production does, then save it as {types[1]}."


def test_integer_that_does_not_fit():
    array = np.array([[1, 2], [3, 2**31]], np.int64)
    problem, _ = refusal({"x": array}, {"x": TensorInfo(TensorProto.INT32, None)})
    assert (
        problem == "'f.npz', input 'x', holds 2147483648 at (1, 1), which does not fit into the model's int32"
    )


def test_unsigned_that_would_wrap_is_refused():
    array = np.array([2**63], np.uint64)
    problem, _ = refusal({"x": array}, {"x": TensorInfo(TensorProto.INT64, None)})
    assert problem == (
        "'f.npz', input 'x', holds 9223372036854775808 at (0), which does not fit into the model's int64"
    )


def test_bfloat16_as_npy_files_hold_it():
    values = np.array([1.0, -2.5], ml_dtypes.bfloat16)
    assert one(values.view("V2"), TensorProto.BFLOAT16).tolist() == [1.0, -2.5]


def test_strings():
    assert one(np.array(["a", "bc"]), TensorProto.STRING).tolist() == ["a", "bc"]


def test_python_objects_of_a_script():
    problem, _ = refusal({"x": np.array([None])}, {"x": TensorInfo(TensorProto.FLOAT, None)})
    assert problem == "'f.npz', input 'x', holds Python objects"


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_an_integer_cast_keeps_every_value_or_refuses(numbers):
    array = np.array(numbers, np.int64)
    try:
        cast = one(array, TensorProto.INT32)
    except DataError:
        assert max(numbers) >= 2**31 or min(numbers) < -(2**31)
    else:
        assert cast.tolist() == numbers
