"""The FP32 model with chosen tensors as its outputs, and counting that goes on while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from numpy.typing import NDArray

from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.model.graph import Model

Array = NDArray[Any]
Item = TypeVar("Item")
Seen = TypeVar("Seen")
Counted = TypeVar("Counted")


class Watcher:
    """A session whose outputs are the watched tensors; graph inputs may be among them.

    ONNX Runtime optimises the graph (a third less time; tensors move in their last bits).
    """

    def __init__(self, model: Model, tensors: Sequence[str], threads: int | None = None) -> None:
        """`threads`: as many and no more; None: as sessions have. Raises EngineError."""
        self._tensors = tuple(dict.fromkeys(tensors))
        computed = [name for name in self._tensors if name not in model.inputs]
        outputs = computed or list(model.outputs)
        self._session = Session(
            with_outputs(model.proto, outputs), model.weights, optimised=True, threads=threads
        )

    def run(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The watched tensors of one batch. Raises EngineError."""
        values = self._session.run(batch)
        return {name: values[name] if name in values else batch[name] for name in self._tensors}


def overlapped(
    items: Iterable[Item], run: Callable[[Item], Seen], count: Callable[[Seen], Counted]
) -> Iterator[Counted]:
    """Run and count every item, in order. While one runs, the one before is counted in another thread.

    ONNX Runtime lets other threads run meanwhile. Two items are in memory at a time.
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[Counted] | None = None
        for item in items:
            seen = run(item)
            if waiting is not None:
                yield waiting.result()
            waiting = pool.submit(count, seen)
            del seen
        if waiting is not None:
            yield waiting.result()
