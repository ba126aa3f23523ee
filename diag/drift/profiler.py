"""`diag.Profiler`: statistics of a model in production, a few lines around what runs it.

    profiler = diag.Profiler("stats/", model="model.onnx", calibration="table.json", rate=0.01)
    session = profiler.wrap(onnxruntime.InferenceSession("model.onnx"))
    session.run(None, feed)  # as before
    profiler.close()

Calls are chosen at random, copied and counted in a thread of its own; neither inputs nor outputs are kept.
Nothing that goes wrong there reaches the caller: it is counted and stands in the statistics.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diag.calibration.table import CalibrationTable, read_table
from diag.drift.collector import Array, Call, Collector, CollectorOptions
from diag.drift.hooks import ModuleHooks
from diag.drift.profile import scaled_by_table, unit_range, watched_tensors
from diag.drift.stats import Kind, Stats, Tensor, empty_stats
from diag.drift.stats_file import is_stats, read_stats
from diag.drift.wrapped import WrappedSession
from diag.engines.stamp import sha256_of
from diag.engines.watch import Watcher
from diag.errors import StatsError, UsageError
from diag.files import output_folder
from diag.model.graph import Model
from diag.model.load import load_model

_CLOSE_S = 30.0


class Profiler:
    """Counts a share of the calls of one model. Its methods may be called from any number of threads."""

    def __init__(
        self,
        out: str | Path,
        *,
        calibration: str | Path,
        model: str | Path | None = None,
        tensors: Literal["io", "all"] = "io",
        rate: float = 0.01,
        rotate_s: float = 3600.0,
        queue_calls: int = 64,
        memory_mb: float = 256.0,
        seed: int | None = None,
    ) -> None:
        """`out`: folder for files of statistics; one every `rotate_s` seconds, and one at the end.

        `calibration`: the table whose scales are the steps, or statistics of `trtdiag profile`. `model`: the
        ONNX model; needed for `tensors="all"`, which also counts the activations that are calibrated: chosen
        calls then run once more, on one thread in the background. `rate`: share of the calls. `queue_calls`
        and `memory_mb` bound what waits; what finds no room is dropped and counted.

        Raises UsageError, ModelError, TableError, StatsError and OutputError: nothing runs yet.
        """
        if not 0 <= rate <= 1:
            raise UsageError(f"a rate of {rate} is no share of the calls", "Give 0 to 1, for example 0.01.")
        if tensors == "all" and model is None:
            raise UsageError("tensors='all' runs the model once more", "Give model=, the ONNX file.")
        self._folder = output_folder(out)
        self._options = CollectorOptions(rate, rotate_s, queue_calls, memory_mb, seed)
        self._model = None if model is None else load_model(str(model))
        self._known = _known(calibration, self._model)
        self._all = tensors == "all"
        self._collector: Collector | None = None

    def wrap(self, session: Any) -> WrappedSession:
        """A stand-in for an ONNX Runtime session, whose `run` is observed.

        Counts the inputs and the outputs that calls ask for. Raises UsageError when something is observed
        already.
        """
        inputs, outputs = session.get_inputs(), session.get_outputs()
        types = {found.name: found.type for found in (*inputs, *outputs)}
        kinds: dict[str, Kind] = {found.name: "input" for found in inputs}
        kinds |= {found.name: "output" for found in outputs if found.name not in kinds}
        if self._all:
            assert self._model is not None
            kinds = watched_tensors(self._model, self._known.index)
        numbers = {n: k for n, k in kinds.items() if n not in types or _is_number(types[n])}
        floats = {name for name, kind in types.items() if _is_float(kind)}
        self._begin(numbers, floats, self._watcher(numbers) if self._all else None)
        return WrappedSession(self, session)

    def hook(self, module: Any, tensors: Mapping[str, str] | Iterable[str]) -> ModuleHooks:
        """Observe the outputs of submodules of a torch module, each time that it is called.

        `tensors`: names of submodules, or a mapping from them to the names under which their outputs are
        counted (those of the calibration). `remove()` of what is returned ends it. Raises UsageError when
        there is no such submodule, or something is observed already.
        """
        names = dict(tensors) if isinstance(tensors, Mapping) else {name: name for name in tensors}
        hooks = ModuleHooks(self, module, names)
        kinds: dict[str, Kind] = dict.fromkeys(names.values(), "activation")
        self._begin(kinds, set(kinds), None)
        hooks.register()
        return hooks

    def observe(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], label: str = "") -> None:
        """One call that has been made: arrays by name. Never raises.

        `label` names it in the statistics, in place of its time and number.
        """
        collector = self._collector
        if collector is None:
            return
        requests = 1
        try:
            requests = requests_in(inputs)
            chosen = collector.chosen(requests)
            if chosen is not None:
                given = {name: _copied(value) for name, value in inputs.items()}
                made = {} if self._all else outputs
                values = given | {name: _copied(value) for name, value in made.items() if _is_array(value)}
                collector.put(Call(given, values, label or chosen, time.time(), requests))
        except Exception as error:  # whatever it is, production goes on
            collector.failed(error, requests)

    def take(self, requests: int) -> str | None:
        """For calls whose values are costly to get: the label if the call is to be counted."""
        return None if self._collector is None else self._collector.chosen(requests)

    def put(self, label: str, inputs: dict[str, Array], values: dict[str, Array], requests: int) -> None:
        """Hand over a call that `take` chose. The arrays must not change any more."""
        if self._collector is not None:
            self._collector.put(Call(inputs, values, label, time.time(), requests))

    def failed(self, error: BaseException, requests: int) -> None:
        """Register calls that could not be counted."""
        if self._collector is not None:
            self._collector.failed(error, requests)

    def close(self) -> None:
        """Count what waits and write the last file. Also done when the process ends."""
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.close(_CLOSE_S)
            atexit.unregister(self.close)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, kinds: Mapping[str, Kind], floats: set[str], watcher: Watcher | None) -> None:
        if self._collector is not None:
            raise UsageError("this profiler observes something already", "Make one for each model.")
        index = self._known.index
        tensors = tuple(
            self._known.tensors[index[name]]
            if name in index
            else Tensor(name, kind, unit_range(name in floats), "unit")
            for name, kind in kinds.items()
        )
        like = empty_stats(self._known.model_sha256, self._known.table_sha256, tensors)
        complete = None if watcher is None else lambda call: watcher.run(call.inputs)
        self._collector = Collector(like, self._folder, self._options, complete)
        atexit.register(self.close)

    def _watcher(self, kinds: Mapping[str, Kind]) -> Watcher:
        assert self._model is not None
        return Watcher(self._model, list(kinds), threads=1)


def _known(calibration: str | Path, model: Model | None) -> Stats:
    """Tensors and scales of a table or of statistics, checked to be the model's."""
    if is_stats(calibration):
        found = read_stats(calibration)
        if model is not None and found.model_sha256 != model.sha256:
            raise StatsError(
                f"statistics {str(calibration)!r} were made with another model",
                "Profile with this one first.",
            )
        return found
    table = read_table(calibration, None if model is None else model.sha256)
    return empty_stats(table.model_sha256, sha256_of(Path(calibration)), _tensors(table, model))


def _tensors(table: CalibrationTable, model: Model | None) -> tuple[Tensor, ...]:
    if model is not None:
        return scaled_by_table(model, watched_tensors(model, table.tensors), table)
    table.scales("int8")
    found = {name: of.range_of(table.method) or 1.0 for name, of in table.tensors.items()}
    return tuple(Tensor(name, "activation", limit, "table") for name, limit in found.items())


def requests_in(inputs: Mapping[str, Any]) -> int:
    """Samples along axis 0, or 1 when the inputs differ in it."""
    sizes = {value.shape[0] if getattr(value, "ndim", 0) else 0 for value in inputs.values()}
    return max(sizes.pop(), 1) if len(sizes) == 1 else 1


def _copied(value: Any) -> Array:
    return np.array(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OUSc"


def _is_number(kind: str) -> bool:
    """Of ONNX Runtime's names of types: `tensor(float16)`, `tensor(string)`, `seq(...)`."""
    return kind.startswith("tensor(") and "string" not in kind and "complex" not in kind


def _is_float(kind: str) -> bool:
    return kind in ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")
