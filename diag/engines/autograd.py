"""What an error in an inner tensor does to the FP32 model's outputs, to first order: gradients by PyTorch.

The float layers behind the first tensor asked for are computed in PyTorch; everything before and beside them
(token ids, masks, shapes) is taken from ONNX Runtime. No code of the model's runs: operators are ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.engines.onnxruntime import Array, Session
from diag.engines.reference import with_outputs
from diag.engines.torch_ops import OPERATORS
from diag.errors import EngineError
from diag.model.graph import Layer, Model, TensorInfo

_AGREEMENT = 1e-3
"""Relative L2 within which PyTorch's outputs must be ONNX Runtime's: far above the rounding of FP32, and far
below what another meaning of an operator does."""


_INSTALL = 'Install it: pip install "trtdiag[torch]"'


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


class Autograd:
    """The reference on one batch, ready to be differentiated by its inner tensors."""

    def __init__(
        self,
        model: Model,
        types: Mapping[str, TensorInfo],
        feed: Mapping[str, Array],
        tensors: Collection[str],
    ) -> None:
        """`tensors`: those whose gradients will be asked for.

        Raises EngineError when PyTorch is missing, an operator is not known, or the results differ from ONNX
        Runtime's.
        """
        self._torch = _torch()
        behind = _behind(model, types, tensors)
        given = _given(model, behind, tensors)
        outputs = [n for n in model.outputs if n in behind]
        values = Session(with_outputs(model.proto, [*given, *outputs]), model.weights).run(feed)
        self.reference = {name: values[name] for name in outputs}
        """The float outputs that depend on the tensors."""
        self._values: dict[str, Any] = {}
        for name in given:
            self._take(name, values[name], name in behind)
        for layer in model.layers:
            if not behind.isdisjoint(layer.outputs) and layer.outputs[0] not in self._values:
                self._compute(model, feed, layer)
        self._agree()

    def products(
        self, errors: Mapping[str, Array], directions: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, float]:
        """For each tensor, the inner product of its error, carried to the outputs, with the directions.

        `directions` has the shape of each output (those left out count nothing), `errors` of each tensor.
        """
        torch = self._torch
        outputs = [self._values[name] for name in directions]
        cotangents = [torch.from_numpy(np.ascontiguousarray(d, np.float32)) for d in directions.values()]
        tensors = [self._values[name] for name in errors]
        gradients = torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True, allow_unused=True)
        return {
            name: 0.0 if gradient is None else float(np.vdot(gradient.numpy(), error))
            for (name, error), gradient in zip(errors.items(), gradients, strict=True)
        }

    def _take(self, name: str, array: Array, differentiable: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights are memory-mapped and read-only; nothing writes here
            self._values[name] = self._torch.from_numpy(np.asarray(array))
        if differentiable:
            self._values[name].requires_grad_()

    def _compute(self, model: Model, feed: Mapping[str, Array], layer: Layer) -> None:
        for name in layer.inputs:
            if name and name not in self._values:
                self._take(name, feed[name] if name in feed else np.asarray(model.constants[name]))
        operator = None if layer.domain or layer.captured else OPERATORS.get(layer.op_type)
        if operator is None:
            raise EngineError(f"no gradient of operator {layer.op_type} is known")
        inputs = [self._values[name] if name else None for name in layer.inputs]
        try:
            made = operator(layer, *inputs)
        except (
            ArithmeticError,
            LookupError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise EngineError(f"no gradient of layer {layer.id!r} ({layer.op_type}): {error}") from error
        parts = made if isinstance(made, (tuple, list)) else [made]
        self._values.update(zip(layer.outputs, parts, strict=False))

    def _agree(self) -> None:
        for name, reference in self.reference.items():
            found = self._values[name].detach().numpy()
            off = float(np.linalg.norm((found - reference).ravel()))
            if not off <= _AGREEMENT * float(np.linalg.norm(reference.ravel())):
                raise EngineError(
                    f"no gradients: PyTorch computes output {name!r} otherwise than ONNX Runtime"
                )


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise EngineError(f"gradients need PyTorch: {error}", _INSTALL) from error


def _behind(model: Model, types: Mapping[str, TensorInfo], tensors: Collection[str]) -> frozenset[str]:
    """The tensors, and every float tensor that depends on them by way of float tensors."""
    reached = set(tensors)
    for layer in model.layers:
        if not reached.isdisjoint(layer.reads):
            reached.update(n for n in layer.outputs if n in types and types[n].is_float)
    return frozenset(reached)


def _given(model: Model, behind: Collection[str], tensors: Collection[str]) -> list[str]:
    """What ONNX Runtime computes: the first tensors of each way, and all else that the layers behind read."""
    given: dict[str, None] = {}
    for layer in model.layers:
        if set(layer.outputs).isdisjoint(behind):
            continue
        if set(layer.reads).isdisjoint(behind):
            given.update(dict.fromkeys(n for n in layer.outputs if n in tensors))
            continue
        computed = [n for n in layer.reads if n in model.producers and n not in model.constants]
        given.update(dict.fromkeys(n for n in computed if n not in behind))
    return list(given)
