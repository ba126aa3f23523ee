"""Pass: FP16 and BF16 by Cast.

Requires: constants lifted; an opset in which each lowered operator knows its format.
Ensures: every layer computes in its float format; graph inputs and outputs keep their types; each constant
is converted once; a tensor is cast at most once to each format; shape and index arithmetic is untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from diag.model.graph import Model, TensorInfo
from diag.numerics.formats import FORMATS, clamp_to
from diag.typed.operands import constant_value
from diag.typed.schemas import op_types
from diag.typed.surgeon import ELEM_TYPE, NAMESPACE, Surgery, inner_graphs, substitute, tensor_names

OutOfRange = Literal["clamp", "inf"]

_ANY_TYPE = frozenset({"Shape", "Size", "Cast", "CastLike"})
"""Operators that take a float of any width as it comes, at their first input."""


def lower_floats(
    surgery: Surgery,
    model: Model,
    formats: Mapping[str, str],
    types: Mapping[str, TensorInfo],
    keep: Collection[tuple[str, int]],
    out_of_range: OutOfRange,
) -> dict[str, str]:
    """Cast every layer named in `formats` to its format (fp16 or bf16); the others compute as before.

    `keep` lists (node name, input) that another pass types; `out_of_range` says what a finite constant
    beyond the format's range becomes. Returns the format of each tensor that is no longer FP32.
    """
    lowering = _Lowering(surgery, model, types, out_of_range)
    nodes: list[Any] = []
    for node in list(surgery.graph.nodes):
        fmt = formats.get(node.name, "fp32")
        lowering.visit(node, fmt, keep)
        before, after = lowering.take_pending()
        nodes.extend([*before, node, *after])
    surgery.graph.nodes.clear()
    surgery.graph.nodes.extend(nodes)
    lowering.settle_constants()
    return lowering.current


class _Lowering:
    def __init__(
        self, surgery: Surgery, model: Model, types: Mapping[str, TensorInfo], out_of_range: OutOfRange
    ) -> None:
        self.surgery = surgery
        self.model = model
        self.types = dict(types)
        self.outputs = {tensor.name for tensor in surgery.graph.outputs}
        self.out_of_range = out_of_range
        self.opset = surgery.graph.opset
        self.current: dict[str, str] = {}
        self._casts: dict[tuple[str, str], Any] = {}
        self._constants: dict[tuple[str, str], Any] = {}
        self._before: list[Any] = []
        self._after: list[Any] = []

    def take_pending(self) -> tuple[list[Any], list[Any]]:
        """New nodes that go before the node just visited, and those that go behind it."""
        pending = self._before, self._after
        self._before, self._after = [], []
        return pending

    def visit(self, node: Any, fmt: str, keep: Collection[tuple[str, int]]) -> None:
        types = op_types(node.op, node.domain or "", self.opset, fmt) if fmt != "fp32" else None
        if node.op == "Cast":
            self._retarget_cast(node, fmt)
            return
        for index, tensor in enumerate(node.inputs):
            if (node.name, index) in keep or not self._is_float(tensor):
                continue
            if index == 0 and node.op in _ANY_TYPE:
                continue
            node.inputs[index] = self._as(tensor, fmt if types and types.reads(index) else "fp32")
        self._visit_subgraphs(node)
        for index, tensor in enumerate(list(node.outputs) if types else ()):
            if types and types.writes(index) and self._is_float(tensor):
                self._lowered(node, tensor, fmt)

    def _lowered(self, node: Any, tensor: Any, fmt: str) -> None:
        """Note that `tensor`, which `node` makes, is now in `fmt`."""
        if tensor.name in self.outputs:
            tensor = self._restored(node, tensor, fmt)
        self.current[tensor.name] = fmt
        tensor.dtype = None  # what the graph says of its type is no longer true

    def _restored(self, node: Any, output: Any, fmt: str) -> Any:
        """A graph output keeps its name and type: its node writes a tensor of another name, which is cast
        back, and which the output's other readers read.
        """
        lowered = gs.Variable(self.surgery.fresh(f"{output.name}/{fmt}"))
        for consumer in list(output.outputs):
            substitute(consumer.inputs, output, lowered)
        substitute(node.outputs, output, lowered)
        self.types[lowered.name] = self.types[output.name]
        self._casts[lowered.name, "fp32"] = output
        self._after.append(self._cast(lowered, output, output.name, "fp32"))
        return lowered

    def _cast(self, source: Any, target: Any, label: str, fmt: str) -> Any:
        name = self.surgery.fresh(f"{NAMESPACE}/cast/{label}/{fmt}")
        return gs.Node("Cast", name, {"to": ELEM_TYPE[fmt]}, [source], [target])

    def _retarget_cast(self, node: Any, fmt: str) -> None:
        """A Cast to FP32 in a lowered layer casts to the layer's format instead: one rounding, not two."""
        if fmt != "fp32" and node.attrs["to"] in (ELEM_TYPE["fp32"], np.float32):
            node.attrs["to"] = ELEM_TYPE[fmt]
            self._lowered(node, node.outputs[0], fmt)

    def _visit_subgraphs(self, node: Any) -> None:
        """Branches compute in FP32: what they read from outside is cast back."""
        for graph in inner_graphs(node):
            for inner in graph.nodes:
                for index, tensor in enumerate(inner.inputs):
                    if tensor.name in self.current:
                        inner.inputs[index] = self._as(tensor, "fp32")
                self._visit_subgraphs(inner)
            for index, tensor in enumerate(graph.outputs):
                if tensor.name in self.current:
                    graph.outputs[index] = self._as(tensor, "fp32")

    def _is_float(self, tensor: Any) -> bool:
        info = self.types.get(tensor.name)
        return info is not None and info.elem_type == ELEM_TYPE["fp32"]

    def _as(self, tensor: Any, fmt: str) -> Any:
        if self.current.get(tensor.name, "fp32") == fmt:
            return tensor
        if isinstance(tensor, gs.Constant):
            return self._converted(tensor, fmt)
        key = (tensor.name, fmt)
        if key not in self._casts:
            self._casts[key] = gs.Variable(self.surgery.fresh(f"{tensor.name}/{fmt}"))
            self._before.append(self._cast(tensor, self._casts[key], tensor.name, fmt))
        return self._casts[key]

    def _converted(self, constant: Any, fmt: str) -> Any:
        key = (constant.name, fmt)
        if key not in self._constants:
            values = constant_value(self.model, constant.name)
            assert values is not None
            lowered = convert_constant(np.asarray(values, np.float32), fmt, self.out_of_range)
            name = self.surgery.fresh(f"{constant.name}/{fmt}")
            self._constants[key] = self.surgery.constant(name, lowered, fmt)
        return self._constants[key]

    def settle_constants(self) -> None:
        """A constant that is now used in one format only keeps the name that the user gave it."""
        in_use = tensor_names(self.surgery.graph)
        for (name, fmt), constant in self._constants.items():
            others = [f for (n, f) in self._constants if n == name and f != fmt]
            if name in in_use or others:
                continue
            self.surgery.weights.pop(name, None)
            if constant.name in self.surgery.weights:
                self.surgery.weights[name] = self.surgery.weights.pop(constant.name)
            constant.name = name


def convert_constant(values: NDArray[np.float32], fmt: str, out_of_range: OutOfRange) -> NDArray[np.generic]:
    """Constant values in a float format. Infinities stay; finite values beyond the range follow the policy.

    TensorRT 8.6 and later clamp (a constant of -3.4e38 becomes -65504 in FP16).
    """
    target = FORMATS[fmt]
    fits = values.size and -target.max <= values.min() and values.max() <= target.max
    if out_of_range == "clamp" and not fits:
        values = np.where(np.isfinite(values), clamp_to(values, target), values).astype(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(target.dtype)
