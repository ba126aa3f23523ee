"""Weak typing, which TensorRT 10 and older still have: precision flags, per-layer precision, a calibrator.

The TensorRT module is always a parameter (see `diag.engines.tensorrt`, the only one that imports it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.engines.scale_cache import parse_scale_cache, with_version
from diag.errors import EngineError
from diag.files import replacing
from diag.kernels.inspector import nodes_in

Array = NDArray[Any]
ToDevice = Callable[[str, Array], int]
"""Copies an input to the GPU and gives its address, which stays valid until that input's next copy."""

FLAGS: Mapping[str, str] = {"fp16": "FP16", "bf16": "BF16", "int8": "INT8"}
OLDEST = (8, 6)
ALGORITHM = "EntropyCalibration2"

_DTYPES: Mapping[str, str] = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int8": "INT8"}
_FLOATS = ("FLOAT", "HALF", "BF16")
_NO_ARITHMETIC = ("CONSTANT", "SHAPE", "CAST", "QUANTIZE", "DEQUANTIZE", "IDENTITY", "ASSERTION")


@dataclass(frozen=True, slots=True)
class WeakTyping:
    """What a weakly typed build is told; plain values, so that it crosses a process border as JSON."""

    formats: tuple[str, ...]
    """Formats the builder may use besides FP32: fp16, bf16, int8."""
    layers: Mapping[str, str] = field(default_factory=dict)
    """ONNX node to the format that it must have."""
    cache: str = ""
    """Calibration cache: read when it exists, written after a calibration."""
    batches: str = ""
    """Folder of .npz to calibrate with; empty when the cache has every scale."""


def refuse(trt: Any, version: tuple[int, int]) -> None:
    """Raise EngineError when this TensorRT has no weak typing any more."""
    if version[0] >= 11 or not hasattr(trt.BuilderFlag, "FP16"):
        raise EngineError(
            f"TensorRT {trt.__version__} has no weak typing: it builds strongly typed networks only",
            "Build without --weak: the plan is then written into the model. TensorRT 10 still has it.",
        )


def apply(
    trt: Any, network: Any, config: Any, weak: WeakTyping, to_device: ToDevice | None = None
) -> tuple[tuple[str, ...], Any]:
    """Set flags, layer precisions and the calibrator.

    Gives notes for the user, and the calibrator, which must stay alive until the build has ended.
    `to_device` replaces the copy to the GPU in tests.
    """
    for fmt in weak.formats:
        _set_flag(trt, config, fmt)
    notes = _pin(trt, network, weak.layers)
    if weak.layers:
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if "int8" not in weak.formats:
        return notes, None
    calibrator, said = _calibrator(trt, network, weak, to_device)
    config.int8_calibrator = calibrator
    return (*notes, *said), calibrator


def _set_flag(trt: Any, config: Any, fmt: str) -> None:
    flag = getattr(trt.BuilderFlag, FLAGS[fmt], None)
    if flag is None:
        raise EngineError(
            f"TensorRT {trt.__version__} cannot build in {fmt} by a flag", "Choose another format."
        )
    config.set_flag(flag)


def _pin(trt: Any, network: Any, layers: Mapping[str, str]) -> tuple[str, ...]:
    """Give every network layer of a pinned node its precision; say which nodes have none."""
    met: set[str] = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        node = next((n for n in _nodes(layer) if n in layers), None)
        if node is None or not _computes_floats(layer):
            continue
        met.add(node)
        dtype = getattr(trt.DataType, _DTYPES[layers[node]])
        layer.precision = dtype
        if layers[node] != "int8":  # an INT8 kernel may still write floats
            _set_outputs(layer, dtype)
    lost = [node for node in layers if node not in met]
    if not lost:
        return ()
    return (f"{len(lost)} pinned node(s) have no layer of their own in TensorRT's network, first {lost[0]}",)


def _nodes(layer: Any) -> tuple[str, ...]:
    """ONNX nodes that a network layer came from; its own name where TensorRT keeps no metadata."""
    return nodes_in(str(getattr(layer, "metadata", "") or "")) or (str(layer.name),)


def _computes_floats(layer: Any) -> bool:
    """Whether a precision can be asked of a layer: not of constants, shapes and indices."""
    if layer.type.name in _NO_ARITHMETIC:
        return False
    outputs = (layer.get_output(slot) for slot in range(layer.num_outputs))
    return any(t is not None and t.dtype.name in _FLOATS and not t.is_shape_tensor for t in outputs)


def _set_outputs(layer: Any, dtype: Any) -> None:
    for slot in range(layer.num_outputs):
        tensor = layer.get_output(slot)
        # A network output keeps the type that its users expect.
        if tensor is not None and tensor.dtype.name in _FLOATS and not tensor.is_network_output:
            layer.set_output_type(slot, dtype)


def _calibrator(
    trt: Any, network: Any, weak: WeakTyping, to_device: ToDevice | None
) -> tuple[Any, tuple[str, ...]]:
    cache = Path(weak.cache) if weak.cache else None
    if cache is not None and cache.is_file():
        kept, notes = _checked_cache(cache, str(trt.__version__))
        return make_calibrator(trt, (), kept, None, to_device or _no_device), notes
    files = sorted(Path(weak.batches).glob("*.npz")) if weak.batches else []
    if not files:
        raise EngineError(
            "an INT8 build with weak typing needs scales", "Give --cache FILE, or --data to calibrate with."
        )
    types = {network.get_input(i).name: network.get_input(i).dtype for i in range(network.num_inputs)}
    batches = (_typed(file, {name: trt.nptype(dtype) for name, dtype in types.items()}) for file in files)
    return make_calibrator(trt, batches, b"", cache, to_device or _polygraphy_device()), ()


def _checked_cache(cache: Path, version: str) -> tuple[bytes, tuple[str, ...]]:
    """The cache's bytes, with the header that this version accepts. Raises TableError, EngineError."""
    raw = cache.read_bytes()
    read = parse_scale_cache(raw.decode("utf-8", "replace"), f"calibration cache {str(cache)!r}")
    if read.algorithm != ALGORITHM:
        raise EngineError(
            f"calibration cache {str(cache)!r} was made by {read.algorithm}; this build reads {ALGORITHM}",
            "Calibrate again with --data, or import the scales with trtdiag calibrate.",
        )
    notes = [f"{len(read.scales)} scales come from the cache {str(cache)!r}; nothing was calibrated"]
    adapted = with_version(raw, version)
    if adapted != raw:
        notes.append(f"the cache was written by TensorRT {read.version}; its header is adapted to {version}")
    return adapted, tuple(notes)


def make_calibrator(trt: Any, batches: Any, kept: bytes, cache: Path | None, to_device: ToDevice) -> Any:
    """An entropy calibrator that feeds `batches`, or answers with the cache `kept`.

    `cache` is where the new cache goes. Exceptions must not cross TensorRT: they are kept in `problem`.
    """
    feed: Iterator[Mapping[str, Array]] = iter(batches)

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]  # known only at run time
        def __init__(self) -> None:
            trt.IInt8EntropyCalibrator2.__init__(self)  # pybind11 wants the base called by name
            self.problem = ""
            self.fed = 0

        def get_batch_size(self) -> int:
            return 1  # explicit batches carry their own size

        def get_batch(self, names: list[str]) -> list[int] | None:
            try:
                batch = next(feed, None)
                if batch is None:
                    return None
                self.fed += 1
                return [to_device(name, batch[name]) for name in names]
            except Exception as error:
                self.problem = f"calibration batch {self.fed}: {error}"
                return None

        def read_calibration_cache(self) -> bytes | None:
            return kept or None

        def write_calibration_cache(self, written: Any) -> None:
            if cache is None or kept:
                return
            try:
                with replacing(cache) as partial:
                    partial.write_bytes(memoryview(written))
            except Exception as error:
                self.problem = f"calibration cache: {error}"

    return Calibrator()


def _typed(file: Path, dtypes: Mapping[str, Any]) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as archive:
        return {name: np.ascontiguousarray(archive[name], dtype) for name, dtype in dtypes.items()}


def _no_device(name: str, array: Array) -> int:
    raise EngineError(f"nothing is calibrated, yet input {name!r} was asked for")


def _polygraphy_device() -> ToDevice:
    """Polygraphy's copy to the GPU, one buffer for each input."""
    from polygraphy.cuda import DeviceArray  # noqa: PLC0415  # it looks for CUDA when it is imported
    from polygraphy.datatype import DataType  # noqa: PLC0415

    buffers: dict[str, Any] = {}

    def copy(name: str, array: Array) -> int:
        buffer = buffers.setdefault(name, DeviceArray(array.shape, DataType.from_dtype(array.dtype)))
        buffer.resize(array.shape).copy_from(array)
        return int(buffer.ptr)

    return copy
