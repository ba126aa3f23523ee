"""One way in: tells what kind of file it is, and reads its kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from diag.errors import DataError
from diag.kernels.inspector import kernels_from_json, times_from_json
from diag.kernels.kernel import Kernel
from diag.kernels.verbose_log import kernels_from_log

Source = Literal["engine", "inspector", "log", "cache", "onnx", "unknown"]

INSPECTOR_SUFFIX = ".inspector.json"
LOG_SUFFIX = ".build.log"
"""A build leaves `<engine>.build.log` beside the engine, and `<engine>.inspector.json` where a GPU was."""

_ONNX_HEAD = b"\x08"  # protobuf's key of ir_version, the first field that exporters write

_HEAD_BYTES = 4096
_LOG_LINE = re.compile(rb"^(?:\[[-/:\d]+\] )?\[(?:VERBOSE|INFO|WARNING|ERROR|[VIWE])\] |^&&&& RUNNING", re.M)
_ENGINE_MAGIC = b"trt"  # preceded by one letter: ftrt (TensorRT 8 to 11), vtrt (TensorRT-RTX)


def detect_source(path: str | Path) -> Source:
    """What kind of file `path` is, from its first bytes: never from its name.

    Raises DataError when the file is missing, empty or cannot be read.
    """
    file = Path(path)
    head = _head(file)
    if head[1:4] == _ENGINE_MAGIC:
        return "engine"
    if head[:1] == _ONNX_HEAD:
        return "onnx"
    if head.startswith(b"TRT-") and b"alibration" in head.split(b"\n", 1)[0]:
        return "cache"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        # Logs begin with a bracket too: `[VERBOSE] ...`, `[11/30/2026-18:13:09] [I] ...`.
        return "log" if _looks_like_log(head) else "inspector"
    if b"\x00" in head:
        return "unknown"
    return "log" if _looks_like_log(head) or _holds_layers(file) else "unknown"


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"file {str(file)!r} does not exist") from error
    except OSError as error:
        raise DataError(f"file {str(file)!r} cannot be read: {error.strerror}") from error
    if not head.strip():
        raise DataError(f"file {str(file)!r} is empty", "The export or the build that wrote it failed.")
    return head


def _looks_like_log(head: bytes) -> bool:
    return _LOG_LINE.search(head) is not None


def _holds_layers(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as stream:
        return any(line.rstrip().endswith("Layers:") for line in stream)


def read_kernels(path: str | Path) -> tuple[Kernel, ...]:
    """Kernels from an inspector JSON, a verbose build log, or what lies beside an engine.

    Raises DataError with a remedy when the file is none of these, is truncated or lists nothing.
    """
    file = Path(path)
    source = detect_source(file)
    if source == "inspector":
        return kernels_from_json(_text(file), f"file {str(file)!r}")
    if source == "log":
        with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            return kernels_from_log(lines, f"file {str(file)!r}")
    if source == "engine":
        return _kernels_beside(file)
    if source == "cache":
        raise DataError(f"file {str(file)!r} is a calibration cache: it lists no kernels")
    if source == "onnx":
        raise DataError(f"file {str(file)!r} is an ONNX model: it lists no kernels")
    raise DataError(
        f"file {str(file)!r} is neither an engine, an inspector's JSON, a build log, a calibration cache nor "
        "a model",
        "Give what IEngineInspector or trtexec --exportLayerInfo wrote, or a VERBOSE build log.",
    )


def _kernels_beside(engine: Path) -> tuple[Kernel, ...]:
    for suffix in (INSPECTOR_SUFFIX, LOG_SUFFIX):
        beside = engine.with_name(engine.name + suffix)
        if beside.is_file():
            return read_kernels(beside)
    raise DataError(
        f"engine {str(engine)!r} has neither a build log (*{LOG_SUFFIX}) nor an inspector file beside it",
        "An engine is read on the GPU it was built for; give the inspector's JSON or the build log.",
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig", errors="replace")


def with_times(kernels: Sequence[Kernel], path: str | Path) -> tuple[Kernel, ...]:
    """The kernels with the times of a profile that trtexec exported, matched by name."""
    _head(Path(path))
    times = times_from_json(_text(Path(path)), f"file {str(path)!r}")
    return tuple(replace(kernel, time_ms=times.get(kernel.name, kernel.time_ms)) for kernel in kernels)
