"""Precision debugging for TensorRT."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diag.drift.profiler import Profiler

__version__ = "0.1.0"
__all__ = ["Profiler", "__version__"]


def __getattr__(name: str) -> Any:
    """`diag.Profiler`, imported when it is first asked for."""
    if name != "Profiler":
        raise AttributeError(f"module 'diag' has no attribute {name!r}")
    from diag.drift.profiler import Profiler  # noqa: PLC0415 (importing diag must stay light)

    return Profiler
