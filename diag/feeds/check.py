"""Does a batch fit the model's inputs? Names, types, shapes and finite values.

Types must be the model's own, except where a cast cannot hide a mistake: integers (and bool) that fit
into the other integer type, floats that the other float type represents exactly, and float64 to float32,
rounded to nearest. Integers are never taken for floats: a raw uint8 image is a preprocessing fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from diag.errors import DataError
from diag.feeds.source import Array, Batch, RawBatch
from diag.model.graph import TensorInfo

_BITS_16 = np.dtype("V2")  # how .npy files hold bfloat16


def checked(
    raw: RawBatch, inputs: Mapping[str, TensorInfo], finite: bool = True, labelled: bool = False
) -> Batch:
    """The batch with the model's own types, in the order of `inputs`.

    `labelled` allows arrays that are no inputs, and leaves them out. Raises DataError naming the file, the
    input and the place when it does not fit; with `finite`, also when it holds NaN or infinity.
    """
    _check_names(raw, inputs, labelled)
    batch: Batch = {}
    sizes: dict[str, tuple[int, str]] = {}
    for name, info in inputs.items():
        where = f"{raw.origin}, input {name!r},"
        array = np.asarray(raw.values[name])
        _check_shape(array, info, where)
        _check_symbols(array, info, name, sizes, raw.origin)
        batch[name] = _typed(array, info, where)
        if finite:
            _check_finite(batch[name], where)
    return batch


def _check_names(raw: RawBatch, inputs: Mapping[str, TensorInfo], labelled: bool) -> None:
    held = list(raw.values)
    missing = [name for name in inputs if name not in raw.values]
    extra = [name for name in held if name not in inputs]
    if missing:
        near = difflib.get_close_matches(missing[0], extra, n=1)
        if near:
            hint = f"Rename {near[0]!r} to {missing[0]!r}."
        elif extra and all(name.startswith("arr_") for name in extra):
            hint = f"np.savez was called without names: use np.savez(path, {missing[0]}=array)."
        else:
            hint = f"It holds {_listed(held)}; the model's inputs are {_listed(inputs)}."
        raise DataError(f"{raw.origin} lacks the model's input {missing[0]!r}", hint)
    if extra and not labelled:
        raise DataError(
            f"{raw.origin} holds {extra[0]!r}, which is no input of the model",
            f"The model's inputs are {_listed(inputs)}; leave out the rest.",
        )


def _listed(names: Iterable[str]) -> str:
    found = [repr(name) for name in names]
    shown = ", ".join(found[:8])
    return f"{shown} and {len(found) - 8} more" if len(found) > 8 else shown or "nothing"


def _check_shape(array: Array, info: TensorInfo, where: str) -> None:
    if info.shape is None:
        return
    fits = array.ndim == len(info.shape) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(info.shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("?" if dim is None else str(dim) for dim in info.shape)
        raise DataError(
            f"{where} has shape {_shown(array.shape)} where the model wants ({wanted})",
            "Reshape the data, or export the model with a dynamic dimension.",
        )


def _check_symbols(
    array: Array, info: TensorInfo, name: str, sizes: dict[str, tuple[int, str]], origin: str
) -> None:
    """Dimensions of one name must have one size within a batch, as ONNX says."""
    for dim, size in zip(info.shape or (), array.shape, strict=False):
        if not isinstance(dim, str):
            continue
        first, owner = sizes.setdefault(dim, (size, name))
        if first != size:
            raise DataError(
                f"{origin} has {first} for dimension {dim!r} in input {owner!r} and {size} in input {name!r}",
                "Both must be equal.",
            )


def _typed(array: Array, info: TensorInfo, where: str) -> Array:
    if info.elem_type == TensorProto.STRING:
        if array.dtype.kind not in "UO" or not all(isinstance(item, str) for item in array.flat):
            raise _wrong_type(array, "string", where)
        return array.astype(object)
    if array.dtype.hasobject:
        raise DataError(f"{where} holds Python objects", "Save plain numeric arrays of one shape.")
    if info.elem_type == TensorProto.UNDEFINED:
        return array
    wanted = np.dtype(tensor_dtype_to_np_dtype(info.elem_type))
    if array.dtype == wanted:
        return array
    if info.elem_type == TensorProto.BFLOAT16 and array.dtype == _BITS_16:
        return array.view(wanted)
    if _is_integer(array.dtype) and _is_integer(wanted):
        return _cast_integers(array, wanted, where)
    if _is_float(array.dtype) and _is_float(wanted):
        return _cast_floats(array, wanted, where)
    raise _wrong_type(array, str(wanted), where)


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub"


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _cast_integers(array: Array, wanted: np.dtype[Any], where: str) -> Array:
    low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
    if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        outside = np.flatnonzero((array < low) | (array > high))[0] if array.dtype.kind != "b" else 0
        place = np.unravel_index(int(outside), array.shape)
        raise DataError(
            f"{where} holds {array[place]} at {_shown(place)}, which does not fit into the model's {wanted}",
            "Check how the data were made.",
        )
    return array.astype(wanted)


def _cast_floats(array: Array, wanted: np.dtype[Any], where: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(wanted)
    rounding_is_fine = array.dtype == np.float64 and wanted == np.float32
    if not rounding_is_fine and not np.array_equal(cast.astype(array.dtype), array, equal_nan=True):
        raise _wrong_type(array, str(wanted), where)
    return cast


def _wrong_type(array: Array, wanted: str, where: str) -> DataError:
    return DataError(
        f"{where} is {array.dtype} where the model wants {wanted}",
        f"Convert it the way production does, then save it as {wanted}.",
    )


def _check_finite(array: Array, where: str) -> None:
    if not _is_float(array.dtype):
        return
    finite = np.isfinite(array)
    if finite.all():
        return
    bad = ~finite
    place = np.unravel_index(int(bad.argmax()), array.shape)
    share = f"{int(bad.sum())} of {array.size} values are not finite"
    raise DataError(
        f"{where} holds {array[place]} at {_shown(place)} ({share})",
        "Remove the batch, or mend what made it.",
    )


def _shown(numbers: tuple[int, ...] | tuple[np.intp, ...]) -> str:
    return f"({', '.join(str(int(n)) for n in numbers)})"
