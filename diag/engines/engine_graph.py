"""An engine's run on fixed buffers as one CUDA graph: a batch costs the host one launch, not hundreds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class EngineGraph:
    """Brings the inputs and runs the engine. The engine must have run on these buffers once before."""

    def __init__(
        self, torch: Any, stream: Any, inputs: Mapping[str, Any], enqueue: Callable[[int], bool]
    ) -> None:
        """`inputs`: the engine's input tensors on the device; `enqueue` runs it on a stream's handle.

        Raises RuntimeError when the engine cannot be captured: it has loops, or reads shapes on the host.
        """
        self._inputs = dict(inputs)
        self._staged = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            for name, tensor in inputs.items()
        }
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="relaxed"):
            for name, tensor in inputs.items():
                tensor.copy_(self._staged[name], non_blocking=True)
            if not enqueue(torch.cuda.current_stream().cuda_stream):
                raise RuntimeError("the engine cannot be captured")

    def fits(self, inputs: Mapping[str, Any], arrays: Mapping[str, Any]) -> bool:
        """Whether it runs on these tensors, and these host arrays have their shapes."""
        return self._inputs.keys() == inputs.keys() and all(
            self._inputs[name] is inputs[name] and tuple(staged.shape) == tuple(arrays[name].shape)
            for name, staged in self._staged.items()
        )

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Start a run on host tensors of torch's, on the current stream; the one before must be done."""
        for name, staged in self._staged.items():
            staged.copy_(arrays[name])
        self._graph.replay()
