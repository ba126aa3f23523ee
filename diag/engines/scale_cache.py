"""TensorRT's calibration cache (TensorRT 10 and older): a header and one scale for each tensor."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diag.errors import TableError

_HEADER = re.compile(r"^TRT-(\d{4,})-(\w+)$")
ENTROPY, MINMAX = "EntropyCalibration2", "MinMaxCalibration"
"""Algorithms of the two calibrators that TensorRT 10 still had in use, as a header names them."""

_HEX_FLOAT = re.compile(r"^[0-9a-fA-F]{8}$")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ScaleCache:
    """A calibration cache as it was read."""

    version: str
    """The TensorRT that wrote it, `10.6.0` for example."""
    algorithm: str
    """`EntropyCalibration2`, `MinMaxCalibration`, ..."""
    scales: Mapping[str, float]
    """Step of each tensor (dynamic range / 127), in the file's order; may be infinite."""


def read_scale_cache(path: str | Path) -> ScaleCache:
    """Read a cache. Raises TableError, with the line, when it is missing, cut off or no cache."""
    name = f"calibration cache {str(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"{name} cannot be read: {error.strerror or error}", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise TableError(
            f"{name} is no text file", "Give the file that TensorRT's calibrator wrote."
        ) from error
    return parse_scale_cache(text, name)


def parse_scale_cache(text: str, name: str) -> ScaleCache:
    """Parse a cache's text; `name` is used in messages. Raises TableError."""
    lines = text.split("\n")  # names may hold other line separators
    header = _HEADER.match(lines[0].strip()) if lines else None
    if header is None:
        raise TableError(
            f"{name} does not begin with `TRT-<version>-<algorithm>`", "Is it a calibration cache at all?"
        )
    scales = dict(_entry(line, number, name) for number, line in enumerate(lines[1:], 2) if line.strip())
    if not scales:
        raise TableError(f"{name} holds no scale", "The calibration that wrote it failed.")
    return ScaleCache(version_text(int(header[1])), header[2], scales)


def _entry(line: str, number: int, name: str) -> tuple[str, float]:
    # Names hold colons and spaces themselves: the last `: ` is the one that counts.
    tensor, colon, value = line.rpartition(": ")
    if not colon or not tensor or not _HEX_FLOAT.match(value.strip()):
        raise TableError(
            f"{name}, line {number} is no `tensor: hexadecimal scale`: {line[:_SHOWN]!r}", "Was it cut off?"
        )
    return tensor, scale_of(value.strip())


def scale_of(text: str) -> float:
    """The scale that eight hexadecimal digits mean."""
    scale: float = struct.unpack("!f", bytes.fromhex(text))[0]
    return scale


def cache_text(version: str, algorithm: str, scales: Mapping[str, float]) -> str:
    """A cache as TensorRT writes it: big-endian float32 in hexadecimal digits."""
    lines = [f"TRT-{version_number(version)}-{algorithm}"]
    lines += [f"{name}: {scale_text(scale)}" for name, scale in scales.items()]
    return "\n".join(lines) + "\n"


def scale_text(scale: float) -> str:
    """Eight hexadecimal digits of a scale as float32."""
    return struct.pack("!f", scale).hex()


def version_text(number: int) -> str:
    """`10.6.0` for 100600, and `8.6.1` for 8601: from TensorRT 10 on the minor version has two digits."""
    major, rest = divmod(number, 10_000 if number >= 100_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def version_number(version: str) -> int:
    """The number that the running TensorRT writes into a header: 100600 for `10.6.0`, 8601 for `8.6.1`."""
    major, minor, patch = (int(part) for part in [*version.split("."), "0", "0"][:3])
    return major * (10_000 if major >= 10 else 1000) + minor * 100 + patch


def with_version(cache: bytes, version: str) -> bytes:
    """The cache with the running TensorRT's version in its header, without which TensorRT ignores it."""
    header, newline, rest = cache.partition(b"\n")
    match = _HEADER.match(header.decode("utf-8", "replace").strip())
    if match is None:
        return cache
    return f"TRT-{version_number(version)}-{match[2]}".encode() + newline + rest
