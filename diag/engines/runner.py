"""Runs built engines, and ONNX Runtime beside them through the same few methods.

torch holds the device's memory and is imported when a TensorRT engine is opened, not before.
"""

from __future__ import annotations

import importlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, Self

import numpy as np

from diag.engines.emulation import emulate
from diag.engines.engine_graph import EngineGraph
from diag.engines.gpu import Gpu, find_gpus
from diag.engines.latency import Latency, summarise
from diag.engines.on_device import DeviceMeters
from diag.engines.onnxruntime import Array, Session
from diag.engines.stamp import Identity, Stamp, check_stamp
from diag.engines.tensorrt import Flavour, load, make_logger
from diag.errors import EngineError
from diag.kernels.kernel import Kernel
from diag.model.graph import Model
from diag.numerics.measured import Measured, TensorKind

Feed = Mapping[str, Array]

WARMUP_MS = 200.0
"""Runs before the ones that count: at least this long, so that the clocks have risen, and at least ten."""

_DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn", "INT8": "int8",
    "UINT8": "uint8", "INT32": "int32", "INT64": "int64", "BOOL": "bool",
}  # fmt: skip
"""TensorRT's name of an element type, and torch's."""

_NO_TORCH = 'Install it: pip install "trtdiag[torch]"'


class Runner(Protocol):
    """Anything that turns input arrays into output arrays."""

    def run(self, feed: Feed) -> dict[str, Array]:
        """Outputs by name, on the host, BF16 and FP8 widened to float32. Raises EngineError."""

    def close(self) -> None:
        """Give back what it holds. It must not be run afterwards."""


class OnnxRuntimeRunner:
    """ONNX Runtime on the CPU as a runner: the reference, the emulation, or a stand-in for an engine."""

    def __init__(self, model: Model, *, optimised: bool = False) -> None:
        self._session: Session | None = Session(model.proto, model.weights, optimised=optimised)

    @classmethod
    def emulation(cls, typed: Model) -> OnnxRuntimeRunner:
        """The typed model with every tensor rounded to its format."""
        emulated = emulate(typed)
        return cls(Model(typed.path, emulated.proto, emulated.weights, typed.sha256))

    def run(self, feed: Feed) -> dict[str, Array]:
        """Outputs by name. Raises EngineError."""
        if self._session is None:
            raise EngineError("the session is closed")
        return self._session.run(feed)

    def close(self) -> None:
        self._session = None


def refuse_output(name: str, shapes: Mapping[str, tuple[int, ...]], reference: Array) -> None:
    """Raises EngineError unless the engine has that output in the reference's shape."""
    hint = "Was it built from another model?"
    if name not in shapes:
        raise EngineError(f"the engine has no output {name!r}", hint)
    if shapes[name] != reference.shape:
        raise EngineError(
            f"output {name!r} has shape {shapes[name]} in the engine, {reference.shape} in the reference",
            hint,
        )


def refuse_elsewhere(stamp: Stamp, version: str, gpus: tuple[Gpu, ...]) -> None:
    """Whether the engine runs on the first GPU of this machine with this TensorRT.

    Raises EngineError with every difference in one sentence.
    """
    if not gpus:
        raise EngineError(
            "no NVIDIA GPU is here, and an engine runs on one only", "Run it on the GPU it was built for."
        )
    built_for, here = _capability(stamp.compute_capability), gpus[0]
    differences = []
    if stamp.version != version and "VERSION_COMPATIBLE" not in stamp.flags:
        differences.append(f"{stamp.flavour} {stamp.version} built it, {version} is installed")
    if built_for and built_for != here.compute_capability:
        differences.append(
            f"it is for compute capability {built_for}, {here.name} has {here.compute_capability}"
        )
    elif stamp.flavour == "tensorrt" and stamp.gpu and stamp.gpu != here.name:
        differences.append(f"it was built on {stamp.gpu}, here is {here.name}")
    if differences:
        raise EngineError(f"the engine cannot run here: {'; '.join(differences)}", "Build it again here.")


def _capability(text: str) -> str:
    """`SM89` and `8.9` are one; `CURRENT` says nothing."""
    digits = text.removeprefix("SM")
    if digits.isdigit() and len(digits) > 1:
        return f"{digits[:-1]}.{digits[-1]}"
    return text if text[:1].isdigit() else ""


class TensorRtRunner:
    """A built engine on the first GPU of this machine, TensorRT or TensorRT-RTX."""

    def __init__(self, engine_path: str | Path, identity: Identity | None = None) -> None:
        """Open an engine that has its stamp beside it; `identity` is what it must have been built from.

        Raises EngineError when the stamp does not fit, TensorRT, torch or the GPU is missing or another, or
        the device's memory does not hold it.
        """
        path = Path(engine_path)
        self.stamp = check_stamp(path, identity or Identity())
        flavour: Flavour = "tensorrt-rtx" if self.stamp.flavour == "tensorrt-rtx" else "tensorrt"
        self._errors: deque[str] = deque(maxlen=1)
        trt = load(flavour)
        refuse_elsewhere(self.stamp, str(trt.__version__), find_gpus())
        self._torch = _torch()
        self._trt = trt
        with self._memory_named():
            self._logger = make_logger(trt, self._keep_error)
            self._runtime = trt.Runtime(self._logger)
            self._engine = self._loaded(self._runtime.deserialize_cuda_engine(path.read_bytes()), "load")
            self.context = self._loaded(self._engine.create_execution_context(), "prepare")
            self._stream = self._torch.cuda.Stream()
        self._buffers: dict[str, Any] = {}
        self._meters: DeviceMeters | None = None
        self._graph: EngineGraph | None = None
        self._uncapturable = False
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        is_input = {n: self._engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
        self.inputs = tuple(n for n in names if is_input[n])
        self.outputs = tuple(n for n in names if not is_input[n])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, feed: Feed) -> dict[str, Array]:
        """Outputs by name, on the host. Raises EngineError, also for shapes outside the engine's profile."""
        with self._memory_named():
            self.bind(feed)
            self.enqueue()
            self._stream.synchronize()
            return {name: _to_host(self._torch, self._buffers[name]) for name in self.outputs}

    def measured(
        self, feed: Feed, references: Sequence[Mapping[str, Array]], kinds: Mapping[str, TensorKind]
    ) -> list[dict[str, Measured]]:
        """Run one batch and measure its outputs on the device, against each set of references by output name.

        Raises EngineError as `run` does, and for an output that is missing or of another shape.
        """
        with self._memory_named():
            wanted = [(name, array) for named in references for name, array in named.items()]
            hosts = self._hosts(feed)
            graph = self._graph_for(feed, hosts)
            meters = self._meters_of(wanted, kinds)
            with self._torch.cuda.stream(self._stream):
                if graph is not None:
                    graph.run(hosts)
                else:
                    self.enqueue()
                meters.bring([array for _, array in wanted])  # while the engine runs
                meters.start()
            self._stream.synchronize()
            results = iter(meters.results())
            return [{name: next(results) for name in named} for named in references]

    def _graph_for(self, feed: Feed, hosts: Mapping[str, Any]) -> EngineGraph | None:
        """The engine's run as a CUDA graph; None, and the batch is bound, where it cannot be captured."""
        inputs = {name: self._buffers[name] for name in self.inputs if name in self._buffers}
        if self._graph is not None and self._graph.fits(inputs, hosts):
            return self._graph
        self.bind(feed)
        if self._uncapturable:
            return None
        self.enqueue()  # TensorRT must have run on these shapes before a capture
        self._stream.synchronize()
        inputs = {name: self._buffers[name] for name in self.inputs}
        try:
            self._graph = EngineGraph(self._torch, self._stream, inputs, self.context.execute_async_v3)
        except RuntimeError:
            self._graph, self._uncapturable = None, True
        return self._graph

    def _meters_of(
        self, wanted: Sequence[tuple[str, Array]], kinds: Mapping[str, TensorKind]
    ) -> DeviceMeters:
        """Meters of these outputs; new ones when an output has moved."""
        shapes = {name: tuple(self._buffers[name].shape) for name in self.outputs}
        for name, reference in wanted:
            refuse_output(name, shapes, reference)
        candidates = [(self._buffers[name], kinds.get(name, TensorKind())) for name, _ in wanted]
        if self._meters is None or not self._meters.are_of(candidates):
            self._meters = DeviceMeters(self._torch, candidates)
            self._meters.capture()
        return self._meters

    def bind(self, feed: Feed) -> None:
        """Bring inputs to the device and make room for the outputs; `enqueue` runs on them."""
        with self._torch.cuda.stream(self._stream):
            for name, host in self._hosts(feed).items():
                self._bind_input(name, host)
            for name in self.outputs:
                shape = tuple(self.context.get_tensor_shape(name))
                if -1 in shape:
                    raise EngineError(f"the shape of output {name!r} depends on the data: it cannot be read")
                self._bind_buffer(name, shape)

    def enqueue(self) -> None:
        """Start one run on what is bound; it is done when the stream is. Raises EngineError."""
        if not self.context.execute_async_v3(self._stream.cuda_stream):
            raise EngineError(f"the engine failed to run{self._last_error()}")

    def latency(self, feed: Feed, runs: int = 200, warmup_ms: float = WARMUP_MS) -> Latency:
        """Time of one run between two CUDA events, inputs on the device already."""
        self.bind(feed)
        warmup = self._warm_up(warmup_ms)
        pairs = [[self._torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, end in pairs:
            start.record(self._stream)
            self.enqueue()
            end.record(self._stream)
        self._stream.synchronize()
        return summarise([start.elapsed_time(end) for start, end in pairs], warmup)

    def _warm_up(self, at_least_ms: float) -> int:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        done = 0
        start.record(self._stream)
        while True:
            for _ in range(10):
                self.enqueue()
            done += 10
            end.record(self._stream)
            end.synchronize()
            if start.elapsed_time(end) >= at_least_ms:
                return done

    def kernel_times(self, feed: Feed, runs: int = 20) -> dict[str, float]:
        """Median milliseconds of each kernel, by the profiler, which slows the whole down: see `latency`.

        It stays attached to the context, so measure latency first, or with another runner.
        """
        self.bind(feed)
        self._warm_up(WARMUP_MS / 4)
        self._profiler = _profiler(self._trt)  # the context does not keep it alive
        self.context.profiler = self._profiler
        for _ in range(runs):
            self.enqueue()
            self._stream.synchronize()
        return {name: median(times) for name, times in self._profiler.times.items()}

    def close(self) -> None:
        """Give back the device's memory."""
        self._meters = self._graph = None
        self._buffers.clear()
        for name in ("context", "_engine", "_runtime"):  # in this order: each needs the next
            self.__dict__.pop(name, None)

    def _hosts(self, feed: Feed) -> dict[str, Any]:
        """The engine's inputs as host tensors of its own types."""
        for name in self.inputs:
            if name not in feed:
                raise EngineError(
                    f"the engine's input {name!r} is not fed", "Was it built from another model?"
                )
        return {name: _to_torch(self._torch, feed[name]).to(self._dtype(name)) for name in self.inputs}

    def _bind_input(self, name: str, host: Any) -> None:
        shape = tuple(host.shape)
        if not self.context.set_input_shape(name, shape):
            raise EngineError(f"input {name!r} of shape {shape} does not fit {self._allowed(name)}")
        self._bind_buffer(name, shape).copy_(host)

    def _bind_buffer(self, name: str, shape: tuple[int, ...]) -> Any:
        """A tensor of that shape, the one from before where it fits, at the engine's address for it."""
        buffer = self._buffers.get(name)
        if buffer is None or tuple(buffer.shape) != shape:
            on_host = self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST
            where = "cpu" if on_host else "cuda"
            buffer = self._torch.empty(shape, dtype=self._dtype(name), device=where)
            self._buffers[name] = buffer
            self.context.set_tensor_address(name, buffer.data_ptr())
        return buffer

    def _dtype(self, name: str) -> Any:
        return getattr(self._torch, _DTYPES[self._engine.get_tensor_dtype(name).name])

    def _allowed(self, name: str) -> str:
        built = tuple(self._engine.get_tensor_shape(name))
        if -1 not in built:
            return f"the engine, which was built for {built}"
        low, _, high = self._engine.get_tensor_profile_shape(name, 0)
        return f"the engine's profile, {tuple(low)} to {tuple(high)}"

    def _loaded(self, thing: Any, what: str) -> Any:
        if thing is None:
            raise EngineError(
                f"TensorRT cannot {what} the engine{self._last_error()}", "Build it again here."
            )
        return thing

    def _keep_error(self, line: str) -> None:
        if line.startswith(("[ERROR]", "[INTERNAL_ERROR]")):
            self._errors.append(" ".join(line.split()))

    def _last_error(self) -> str:
        return f": {self._errors[-1][:300]}" if self._errors else ""

    @contextmanager
    def _memory_named(self) -> Iterator[None]:
        """Turn the device running out of memory into one sentence."""
        try:
            yield
        except (RuntimeError, EngineError) as error:
            if "out of memory" not in str(error).lower() and "OutOfMemory" not in str(error):
                raise
            raise EngineError(
                f"the GPU's memory does not hold the engine and its tensors{_free(self._torch)}",
                "Close what else runs on it, or take a smaller batch.",
            ) from error


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise EngineError(f"running an engine needs PyTorch: {error}", _NO_TORCH) from error
    if not torch.cuda.is_available():
        raise EngineError(
            f"PyTorch {torch.__version__} finds no CUDA GPU, which running an engine needs",
            "Install a PyTorch built for CUDA and a driver that is new enough for it.",
        )
    return torch


def _to_torch(torch: Any, array: Array) -> Any:
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":  # types that NumPy itself does not know
        array = array.astype(np.float32)
    ready = array.flags.c_contiguous and array.flags.writeable
    return torch.from_numpy(array if ready else array.copy())


def _to_host(torch: Any, tensor: Any) -> Array:
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    array: Array = tensor.cpu().numpy()
    return array if tensor.is_cuda else array.copy()


def _free(torch: Any) -> str:
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return ""
    return f" ({free / 1e6:.0f} of {total / 1e6:.0f} MB are free)"


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc]  # the base class is known only at run time
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)  # pybind11 wants the base called by name
            self.times: dict[str, list[float]] = defaultdict(list)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times[layer_name].append(ms)

    return Profiler()


def timed(kernels: tuple[Kernel, ...], times: Mapping[str, float]) -> tuple[Kernel, ...]:
    """The kernels with their times, matched by name; one that was not timed keeps what it has."""
    return tuple(replace(k, time_ms=times.get(k.name, k.time_ms)) for k in kernels)
