"""Optimisation profiles: smallest, usual and largest shape of each dynamic input, as given or from data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from diag.engines.tensorrt import Shape
from diag.errors import UsageError
from diag.feeds import Feeds
from diag.model.graph import TensorInfo

Profile = tuple[Shape, Shape, Shape]

_SHAPE = re.compile(r"^\d+(?:[x,]\d+)*$")
_HINT = "Write INPUT:MIN/OPT/MAX, for example input_ids:1x64/8x64/16x64, or one shape for all three."


def profiles_for(
    inputs: Mapping[str, TensorInfo], given: Sequence[str], feeds: Feeds | None
) -> dict[str, Profile]:
    """A profile for every dynamic input: the given one, else what the data show.

    Raises UsageError when one is malformed, does not fit its input, or is missing.
    """
    profiles = dict(parse_profile(text, inputs) for text in given)
    dynamic = {name: info for name, info in inputs.items() if _is_dynamic(info)}
    missing = [name for name in dynamic if name not in profiles]
    if missing and feeds is None:
        listed = ", ".join(f"{name} {_dims_text(dynamic[name])}" for name in missing)
        raise UsageError(
            f"inputs have dynamic dimensions, and no shapes are given for them: {listed}",
            f"Give --shapes {missing[0]}:MIN/OPT/MAX for each, or --data.",
        )
    if missing and feeds is not None:
        measured = measured_profiles(feeds)
        profiles |= {name: measured[name] for name in missing}
    return {name: profiles[name] for name in dynamic}


def measured_profiles(feeds: Feeds) -> dict[str, Profile]:
    """Smallest, most frequent and largest shape of each input over all batches."""
    seen: dict[str, Counter[Shape]] = {}
    for batch in feeds:
        for name, array in batch.items():
            seen.setdefault(name, Counter())[tuple(int(size) for size in array.shape)] += 1
    return {name: _spanned(shapes) for name, shapes in seen.items()}


def _spanned(shapes: Counter[Shape]) -> Profile:
    sizes = list(zip(*shapes, strict=True))  # by dimension
    return tuple(map(min, sizes)), shapes.most_common(1)[0][0], tuple(map(max, sizes))


def parse_profile(text: str, inputs: Mapping[str, TensorInfo]) -> tuple[str, Profile]:
    """`INPUT:MIN/OPT/MAX` (or one shape for all three), checked against the input. Raises UsageError."""
    name, colon, shapes = text.rpartition(":")  # names hold colons themselves
    parts = shapes.split("/")
    if not colon or len(parts) not in (1, 3) or not all(_SHAPE.match(part) for part in parts):
        raise UsageError(f"--shapes {text!r} cannot be read", _HINT)
    if name not in inputs:
        known = ", ".join(inputs) or "none"
        raise UsageError(f"--shapes names {name!r}, which is no input of the model", f"Its inputs: {known}.")
    read = [tuple(int(size) for size in re.split("[x,]", part)) for part in parts]
    low, usual, high = read if len(read) == 3 else read * 3
    _check(name, inputs[name], (low, usual, high))
    return name, (low, usual, high)


def _check(name: str, info: TensorInfo, profile: Profile) -> None:
    """Raise UsageError when no batch could ever fit the profile."""
    shown = "/".join("x".join(map(str, shape)) for shape in profile)
    for shape in profile:
        if info.shape is not None and not _fits(shape, info.shape):
            raise UsageError(f"--shapes {name}:{shown} does not fit the input, which is {_dims_text(info)}")
    if not all(a <= b <= c for a, b, c in zip(*profile, strict=True)):
        raise UsageError(
            f"--shapes {name}:{shown} is impossible: it must rise from smallest to usual to largest"
        )


def _fits(shape: Shape, dims: Sequence[int | str | None]) -> bool:
    return len(shape) == len(dims) and all(
        size == dim or not isinstance(dim, int) for size, dim in zip(shape, dims, strict=True)
    )


def _is_dynamic(info: TensorInfo) -> bool:
    return info.shape is None or any(not isinstance(dim, int) for dim in info.shape)


def _dims_text(info: TensorInfo) -> str:
    if info.shape is None:
        return "(unknown rank)"
    return f"({', '.join('?' if dim is None else str(dim) for dim in info.shape)})"
