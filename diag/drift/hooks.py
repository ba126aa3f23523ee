"""Forward hooks of a torch module. Torch itself is never imported: what is given brings its methods."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diag.errors import UsageError

if TYPE_CHECKING:
    from diag.drift.profiler import Profiler

Array = NDArray[Any]


class _Chosen(threading.local):
    """The call that a thread is in, if it is to be counted."""

    label: str | None = None
    requests: int = 1
    inputs: dict[str, Array]
    values: dict[str, Array]


class ModuleHooks:
    """Hooks on a module, whose calls are chosen, and on submodules, whose outputs are taken."""

    def __init__(self, profiler: Profiler, module: Any, names: Mapping[str, str]) -> None:
        """`names`: submodule to tensor. Raises UsageError when the module has no such submodule."""
        self._profiler, self._module = profiler, module
        modules = dict(module.named_modules())
        strange = [name for name in names if name not in modules]
        if strange:
            raise UsageError(
                f"the module has no submodule {strange[0]!r}", "named_modules() lists what there is."
            )
        self._watched = {tensor: modules[name] for name, tensor in names.items()}
        self._parameters = list(inspect.signature(module.forward).parameters)
        self._chosen = _Chosen()
        self._handles: list[Any] = []

    def register(self) -> None:
        """Begin to observe."""
        begin = self._module.register_forward_pre_hook(self._begin, with_kwargs=True)
        takers = [part.register_forward_hook(self._taker(name)) for name, part in self._watched.items()]
        self._handles = [begin, *takers, self._module.register_forward_hook(self._end)]

    def remove(self) -> None:
        """Observe no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = self._chosen
        chosen.label, chosen.requests = None, 1
        try:
            given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            tensors = {name: value for name, value in given.items() if _is_tensor(value)}
            sizes = {int(value.shape[0]) if value.ndim else 0 for value in tensors.values()}
            chosen.requests = max(sizes.pop(), 1) if len(sizes) == 1 else 1
            label = self._profiler.take(chosen.requests)
            if label is not None:
                chosen.inputs = {name: _array(value) for name, value in tensors.items()}
                chosen.values = {}
                chosen.label = label
        except Exception as error:  # whatever it is, production goes on
            self._profiler.failed(error, chosen.requests)

    def _taker(self, name: str) -> Callable[[Any, Any, Any], None]:
        def take(_module: Any, _args: Any, output: Any) -> None:
            if self._chosen.label is None:
                return
            try:
                first = output[0] if isinstance(output, tuple | list) else output
                self._chosen.values[name] = _array(first)
            except Exception as error:
                self._chosen.label = None
                self._profiler.failed(error, self._chosen.requests)

        return take

    def _end(self, _module: Any, _args: Any, _output: Any) -> None:
        chosen = self._chosen
        if chosen.label is not None:
            label, chosen.label = chosen.label, None
            self._profiler.put(label, chosen.inputs, chosen.values, chosen.requests)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "shape")


def _array(tensor: Any) -> Array:
    """A copy in main memory; floats as float32, since NumPy does not know all of torch's types."""
    found = tensor.detach()
    if found.is_floating_point():
        found = found.float()
    return np.array(found.cpu().numpy())
