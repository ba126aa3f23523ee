"""A stand-in for an ONNX Runtime session that has its calls observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diag.drift.profiler import Profiler


class WrappedSession:
    """Everything but `run` is the session's own."""

    def __init__(self, profiler: Profiler, session: Any) -> None:
        self._profiler, self._session = profiler, session
        self._outputs = [found.name for found in session.get_outputs()]

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], *more: Any, **options: Any
    ) -> Any:
        """As the session's own; what it raises, this raises."""
        values = self._session.run(output_names, input_feed, *more, **options)
        self._profiler.observe(input_feed, dict(zip(output_names or self._outputs, values, strict=False)))
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
