"""Profiles a model on data: which tensors are counted, with which scales, and the pass over the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from diag.calibration.meter import channel_axis_of
from diag.calibration.table import CalibrationTable
from diag.drift.accumulate import Requests, count_batch
from diag.drift.bins import LAST_CODE
from diag.drift.merge import Merger
from diag.drift.slices import split_by_slice
from diag.drift.stats import Kind, ScaleFrom, Source, Stats, Tensor
from diag.engines.watch import Watcher
from diag.errors import TableError
from diag.feeds import Feeds
from diag.model.graph import FLOAT_TYPES, Model, TensorInfo
from diag.progress import Progress

Array = NDArray[Any]

_UNIT_STEP = 1 / 32
"""Step of a tensor of floats that is not calibrated: fine for values around 1."""
_NOT_COUNTED = frozenset(
    {TensorProto.UNDEFINED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128}
)


def watched_tensors(model: Model, activations: Iterable[str]) -> dict[str, Kind]:
    """Graph inputs, the given activations in graph order, graph outputs; what holds no numbers left out."""
    made = {name: layer.index for name, layer in model.producers.items()}
    inner = sorted((n for n in set(activations) if n not in model.inputs), key=lambda n: (made.get(n, -1), n))
    inputs: dict[str, Kind] = {name: "input" for name, info in model.inputs.items() if _is_counted(info)}
    outputs = [name for name, info in model.outputs.items() if _is_counted(info) and name in made]
    rest: dict[str, Kind] = {name: "activation" for name in inner if name not in outputs}
    last: dict[str, Kind] = dict.fromkeys(outputs, "output")
    return {**inputs, **rest, **last}


def _is_counted(info: TensorInfo) -> bool:
    return info.elem_type not in _NOT_COUNTED


def scaled_by_table(model: Model, kinds: Mapping[str, Kind], table: CalibrationTable) -> tuple[Tensor, ...]:
    """The tensors with the table's ranges; graph inputs and outputs that it lacks have unit steps.

    Raises TableError when the table holds a tensor that the model does not compute, or lacks its own method.
    """
    strange = [name for name in table.tensors if name not in model.producers and name not in model.inputs]
    if strange:
        raise TableError(
            f"the calibration table holds tensor {strange[0]!r}, which the model does not compute",
            "Make a table for this model with trtdiag calibrate.",
        )
    table.scales("int8")  # a method that the table lacks is refused here
    ranges = {name: found.range_of(table.method) or 0.0 for name, found in table.tensors.items()}
    types = {**model.inputs, **model.outputs}
    return tuple(
        Tensor(name, kind, _usable(ranges[name]), "table")
        if name in ranges
        else Tensor(name, kind, unit_range(types[name].elem_type in FLOAT_TYPES), "unit")
        for name, kind in kinds.items()
    )


def scaled_by_data(
    model: Model, kinds: Mapping[str, Kind], feeds: Feeds, progress: Progress
) -> tuple[Tensor, ...]:
    """The tensors with the largest finite magnitudes that the data give: one more pass over them."""
    watcher = Watcher(model, list(kinds))
    ranges = dict.fromkeys(kinds, 0.0)
    progress.start("measuring the ranges of the data", len(feeds))
    for batch in feeds:
        for name, array in watcher.run(batch).items():
            ranges[name] = max(ranges[name], _absmax(array))
        progress.advance()
    scale_from: ScaleFrom = "data"
    return tuple(Tensor(name, kind, _usable(ranges[name]), scale_from) for name, kind in kinds.items())


def _absmax(array: Array) -> float:
    if not array.size:
        return 0.0
    found = max(-float(array.min()), float(array.max()))
    if math.isfinite(found):
        return max(found, 0.0)
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0))


def _usable(found: float) -> float:
    """A range that a step can be taken from: that of zeros is 1, as for a quantizer."""
    return max(found, float(np.finfo(np.float32).tiny) * LAST_CODE) if found > 0 else 1.0


def unit_range(floats: bool) -> float:
    """The range of a tensor that is not calibrated: its step is 1, or 1/32 where it holds floats."""
    return LAST_CODE * (_UNIT_STEP if floats else 1.0)


def profile(
    model: Model, like: Stats, feeds: Feeds, channels: bool, when: float | None, progress: Progress
) -> Stats:
    """Count the tensors of `like` over all batches. Memory does not grow with their number.

    `when`: the time of the data, in seconds since 1970. Raises DataError and EngineError.
    """
    found = profile_slices(model, like, feeds, channels, when, progress, None)
    return next(iter(found.values()), like)


def profile_slices(
    model: Model,
    like: Stats,
    feeds: Feeds,
    channels: bool,
    when: float | None,
    progress: Progress,
    slices: Iterator[str] | None,
) -> dict[str, Stats]:
    """As `profile`, one statistics for each slice: `slices` gives the slice of each request in turn (None:
    one slice of all). Raises DataError also when it ends before the requests do."""
    names = [tensor.name for tensor in like.tensors]
    watcher = Watcher(model, names)
    axes = {name: channel_axis_of(model, name) for name in names} if channels else {}

    mergers: dict[str, Merger] = {}
    progress.start("profiling", len(feeds))
    # One after the other: counting beside ONNX Runtime, or in several threads, took longer on two cores.
    for origin, batch in feeds.with_origins():
        for part in split_by_slice(batch, watcher.run(batch), short_label(origin), slices):
            source = _source(part.requests, feeds.seed, when)
            stats = count_batch(like, part.values, part.requests, axes, source)
            mergers.setdefault(part.name, Merger(like)).add(stats)
            del part  # its memory is the next batch's
        progress.advance()
    return {name: merger.result() for name, merger in mergers.items()}


def _source(requests: Requests, seed: int | None, when: float | None) -> Source:
    return Source(
        batches=1,
        requests=len(requests.labels),
        identity=requests.identity,
        seeds=frozenset() if seed is None else frozenset({seed}),
        begun=math.inf if when is None else when,
        ended=-math.inf if when is None else when,
    )


def short_label(origin: str) -> str:
    """`'long/path/de/003.npz'` as `de/003.npz`: names of files and their folder, without quotes."""
    if not origin.startswith("'"):
        return origin
    file, _, rest = origin[1:].partition("'")
    return "/".join(PurePath(file).parts[-2:]) + rest
