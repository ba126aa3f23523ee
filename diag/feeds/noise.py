"""Random inputs, for trying a model out: `random:SEED` or `random:SEED:batch=2,seq=16,batches=8`.

Floats are standard normal. Integers are drawn from 0 to 99, which is inside any vocabulary; the names of
inputs are read as hints so that common models run at all: `mask` is fed ones, `type_ids` and `segment`
zeros, `position` counts up along the last axis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from diag.errors import DataError
from diag.feeds.source import Array, RawBatch, counted
from diag.model.graph import TensorInfo

DEFAULT_BATCHES = 4
DEFAULT_DIM = 64
"""Size of a dimension that the model leaves open; the first dimension takes 1."""
_INTEGERS = 100  # drawn from 0 to 99

_HINT = "Write random:SEED, or random:SEED:batch=2,seq=16,batches=8."


@dataclass(frozen=True)
class Noise:
    """Random batches; the same seed gives the same batches everywhere."""

    seed: int
    inputs: Mapping[str, TensorInfo]
    shapes: Mapping[str, tuple[int, ...]]
    number: int = DEFAULT_BATCHES

    def label(self, limit: int | None) -> str:
        taken = counted(self.count(limit), "batch")
        return (
            f"{taken} of RANDOM data, seed {self.seed}: they prove little, real inputs may behave otherwise"
        )

    def count(self, limit: int | None) -> int:
        return self.number if limit is None else min(limit, self.number)

    def batches(self) -> Iterator[RawBatch]:
        for index in range(self.number):
            rng = np.random.default_rng((self.seed, index))
            values = {n: _draw(rng, n, i.elem_type, self.shapes[n]) for n, i in self.inputs.items()}
            yield RawBatch(f"random batch {index}", values)

    def digest(self, limit: int | None) -> str:
        text = f"random\0{self.seed}\0{self.count(limit)}\0{sorted(self.shapes.items())}"
        return hashlib.sha256(text.encode()).hexdigest()


def parse_noise(spec: str, inputs: Mapping[str, TensorInfo]) -> Noise:
    """Random data as `random:SEED[:OPTIONS]` asks for it; an option is DIM=N, INPUT.AXIS=N or batches=N.

    Raises DataError when the seed or an option is malformed, or names no open dimension of `inputs`.
    """
    _, _, rest = spec.partition(":")
    seed, _, options = rest.partition(":")
    if not (seed.isascii() and seed.isdigit()):
        raise DataError(f"{spec!r} gives no seed for random data", _HINT)
    sizes = _parse_options(spec, options)
    number = sizes.pop("batches", DEFAULT_BATCHES)
    shapes = {name: _shape(name, info, sizes) for name, info in inputs.items()}
    known = {key for name, info in inputs.items() for key in _keys(name, info)}
    unknown = sorted(set(sizes) - known)
    if unknown:
        raise DataError(
            f"{spec!r} sets {unknown[0]!r}, which is no open dimension of the model's inputs",
            f"Open dimensions: {', '.join(sorted(known)) or 'none'}.",
        )
    return Noise(int(seed), inputs, shapes, number)


def _parse_options(spec: str, options: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.rpartition("=")
        if not key or not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise DataError(f"{option!r} in {spec!r} is not NAME=SIZE with a size of 1 or more", _HINT)
        sizes[key] = int(value)
    return sizes


def _keys(name: str, info: TensorInfo) -> Iterator[str]:
    """What an option may call the open dimensions of one input: its symbol, else `INPUT.AXIS`."""
    for axis, dim in enumerate(info.shape or ()):
        if not isinstance(dim, int):
            yield dim if dim else f"{name}.{axis}"


def _shape(name: str, info: TensorInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if info.shape is None or info.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        raise DataError(
            f"random data cannot be made for input {name!r}, whose type or rank is not known",
            "Give real data as .npz files.",
        )
    shape = []
    for axis, dim in enumerate(info.shape):
        if isinstance(dim, int):
            shape.append(dim)
        else:
            shape.append(sizes.get(dim or f"{name}.{axis}", 1 if axis == 0 else DEFAULT_DIM))
    return tuple(shape)


def _draw(rng: np.random.Generator, name: str, elem_type: int, shape: tuple[int, ...]) -> Array:
    dtype = np.dtype(tensor_dtype_to_np_dtype(elem_type))
    lower = name.lower()
    if "mask" in lower:
        return np.ones(shape, dtype)
    if elem_type == TensorProto.BOOL:
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        if "type_ids" in lower or "segment" in lower:
            return np.zeros(shape, dtype)
        if "position" in lower and shape:
            return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy()
        return rng.integers(0, _INTEGERS, shape).astype(dtype)
    return rng.standard_normal(shape, np.float32).astype(dtype)
