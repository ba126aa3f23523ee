"""ONNX Runtime sessions: the FP32 reference and the emulator. The only module that imports onnxruntime."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from diag.errors import EngineError
from diag.model.external import PACKED

Array = NDArray[Any]

LOWEST = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
HIGHEST = ort.GraphOptimizationLevel.ORT_ENABLE_ALL

_FATAL_ONLY = 4

MAX_THREADS = 16
"""Threads of one session; a comparison may hold dozens of sessions."""


class Session:
    """One graph, ready to run on the CPU."""

    def __init__(
        self,
        proto: ModelProto,
        weights: Mapping[str, Array],
        *,
        optimised: bool = False,
        threads: int | None = None,
    ) -> None:
        """`weights` are the values of external stubs in `proto`; `threads`: so many of the session's own.

        Raises EngineError, naming the operator where ONNX Runtime does, when it cannot run the graph.
        """
        options = ort.SessionOptions()
        options.graph_optimization_level = HIGHEST if optimised else LOWEST
        options.log_severity_level = _FATAL_ONLY
        # Otherwise optimisation makes one node of INT4 weights and MatMul that quantizes the activation too.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        _settle(options, threads)
        proto = _with_packed(proto, weights)
        stubs = [t for t in proto.graph.initializer if _is_stub(t)]
        # ONNX Runtime copies the values while it makes the session, so they need not be kept afterwards.
        values = [_ort_value(weights[t.name], t.data_type) for t in stubs]
        if stubs:
            options.add_external_initializers([t.name for t in stubs], values)
        try:
            self._session = ort.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise EngineError(
                f"ONNX Runtime {ort.__version__} cannot run the model: {reason(error)}",
                "Check that the operator is a standard one of the model's opset.",
            ) from error
        self.inputs = tuple(i.name for i in self._session.get_inputs())
        self.outputs = tuple(o.name for o in self._session.get_outputs())

    def run(self, feed: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Output arrays by name. `feed` may hold more than the session's inputs. Raises EngineError."""
        names = list(outputs) if outputs is not None else list(self.outputs)
        wanted = {name: feed[name] for name in self.inputs}
        try:
            values = self._session.run(names, wanted)
        except Exception as error:
            raise EngineError(
                f"ONNX Runtime failed while it ran the model: {reason(error)}",
                "Check the data: token ids inside the vocabulary, lengths that the model takes.",
            ) from error
        return dict(zip(names, values, strict=True))


_process_is_ours = False


def own_process() -> None:
    """Say that no one else uses ONNX Runtime in this process (the command line): sessions share threads.

    One pool of threads and one of memory serve all slices. Once made, ONNX Runtime refuses sessions that
    a caller makes in the ordinary way, so a library must not do this.
    """
    global _process_is_ours
    _process_is_ours = True


def _settle(options: Any, threads: int | None) -> None:
    """Threads and memory of a session."""
    if _process_is_ours and threads is None:
        _share_environment()
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        return
    options.intra_op_num_threads = threads or min(processors(), MAX_THREADS)
    # A comparison holds dozens of sessions: their threads must not spin in each other's way, and their pools
    # of memory, which never shrink, would add up.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = False


@lru_cache(maxsize=1)
def _share_environment() -> None:
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)
    ort.set_global_thread_pool_sizes(min(processors(), MAX_THREADS), 1)


def processors() -> int:
    """Processors that this process may use (a calibration worker pins itself to its share)."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _with_packed(proto: ModelProto, weights: Mapping[str, Array]) -> ModelProto:
    """The model with its 4-bit values inside: ONNX packs two in a byte, and arrays hold one."""
    packed = {t.name for t in proto.graph.initializer if _is_stub(t) and t.data_type in PACKED}
    if not packed:
        return proto
    whole = ModelProto()
    whole.CopyFrom(proto)
    for tensor in whole.graph.initializer:
        if tensor.name in packed:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weights[tensor.name]), tensor.name))
    return whole


def _is_stub(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _ort_value(array: Array, elem_type: int) -> Any:
    array = np.ascontiguousarray(array)
    if array.dtype.kind in "fiub":
        return ort.OrtValue.ortvalue_from_numpy(array)
    storage = array.view(f"u{array.dtype.itemsize}")  # types that NumPy itself does not know
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(storage, elem_type)


def reason(error: Exception) -> str:
    """ONNX Runtime's message without its status prefix and source position, on one line."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", text)
    return re.sub(r"\S*/onnxruntime/\S+ \S+ ", "", text)[:400]


def version() -> str:
    """ONNX Runtime's version."""
    return str(ort.__version__)
