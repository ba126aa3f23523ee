"""Which of a model's tensors the names in a TensorRT calibration cache mean.

TensorRT's parser keeps the ONNX names of tensors that nodes write. It calls a constant's tensor
`<constant>_output`, a tensor inside a layer that it splits `<node>_output`, and what it adds itself
`(Unnamed Layer* 7) [Constant]_output` or `ONNXTRT_Broadcast_7_output`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from diag.model.graph import Model

_SUFFIX = "_output"
_MADE_BY_TENSORRT = re.compile(r"^(\(Unnamed Layer\* \d+\)|ONNXTRT_)")


@dataclass(frozen=True, slots=True)
class CacheNames:
    """The names of a cache, by what they are in a model; each in the cache's order."""

    activations: tuple[str, ...]
    """Tensors whose values depend on the model's inputs."""
    constants: tuple[str, ...]
    """Constants (and what is folded from them) that were calibrated as if they were activations."""
    inside: tuple[str, ...]
    """Tensors inside one of the model's layers, which ONNX does not name."""
    made: tuple[str, ...]
    """Tensors of layers that TensorRT adds."""
    unmatched: tuple[str, ...]
    """Names that fit nothing in the model."""

    @property
    def fit_share(self) -> float:
        """Share of the entries that fit the model, those that TensorRT made left out; 0 without any."""
        fit = len(self.activations) + len(self.constants) + len(self.inside)
        return fit / (fit + len(self.unmatched)) if fit else 0.0


def match_names(names: Iterable[str], model: Model) -> CacheNames:
    """Sort the names of a cache by what they are in `model`."""
    found: dict[str, list[str]] = {key: [] for key in CacheNames.__slots__}
    known = _Known(model)
    for name in names:
        found[known.kind(name)].append(name)
    return CacheNames(**{key: tuple(entries) for key, entries in found.items()})


class _Known:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._tensors = {*model.inputs, *model.producers}

    def kind(self, name: str) -> str:
        model = self._model
        if name in model.value_dependent:
            return "activations"
        if name in self._tensors or self._is_constant(name):
            return "constants"
        if _MADE_BY_TENSORRT.match(name):
            return "made"
        base = name.removesuffix(_SUFFIX)
        if base == name:
            return "unmatched"
        if self._is_constant(base):
            return "constants"
        return "inside" if base in model.layer_by_id or base in self._tensors else "unmatched"

    def _is_constant(self, name: str) -> bool:
        return name in self._model.constants or (
            name in self._tensors and name not in self._model.value_dependent
        )
