"""Edits of an FP32 model: constants replaced, nodes inserted. Names of layers and tensors stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from diag.model.graph import Model, captured_names
from diag.model.load import initializer
from diag.typed.surgeon import NAMESPACE

Float = NDArray[np.float32]


class Rewrite:
    """A copy of a model under edits; `finish` gives the edited one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._proto = ModelProto()
        self._proto.CopyFrom(model.proto)
        self._weights: dict[str, NDArray[np.generic]] = dict(model.weights)
        self._nodes = {node.name: node for node in self._proto.graph.node}
        self._before: dict[str, list[NodeProto]] = {}
        reads = (name for node in self._proto.graph.node for name in (*node.input, *captured_names(node)))
        self._reads = Counter(reads)
        self._reads.update(value.name for value in self._proto.graph.output)
        self._own: dict[str, Float] = {}
        """Values of constants that were edited, by name."""

    def constant(self, layer: str, index: int) -> Float:
        """The constant at input `index` of a layer, as edited so far."""
        name = self._nodes[layer].input[index]
        value = self._own[name] if name in self._own else self._model.constant(name)
        assert value is not None
        return np.asarray(value, np.float32)

    def put(self, layer: str, index: int, values: Float) -> None:
        """Give a layer another constant. One that others read too stays as it is for them."""
        node = self._nodes[layer]
        name = node.input[index]
        if name not in self._model.initializers or self._reads[name] > 1:
            self._reads[name] -= 1
            name = self.fresh(f"{name}/compensated")
            node.input[index] = name
        self._store(name, values)

    def add(self, name: str, values: NDArray[np.generic]) -> str:
        """A new constant; the name it got."""
        name = self.fresh(name)
        tensor = numpy_helper.from_array(values, name)
        self._proto.graph.initializer.append(tensor)
        return name

    def fresh(self, name: str) -> str:
        """`name`, or the first of `name#2`, `name#3`, ... that is not in use."""
        candidate, count = name, 1
        while self._reads[candidate] or candidate in self._model.producers:
            count += 1
            candidate = f"{name}#{count}"
        self._reads[candidate] += 1
        return candidate

    def insert(
        self, op_type: str, label: str, inputs: Sequence[str], readers: Sequence[str], **attrs: int
    ) -> str:
        """Put a node between its first input and the layers that read it; the tensor they read instead."""
        name = self.fresh(f"{NAMESPACE}/{label}/{inputs[0]}")
        node = NodeProto(op_type=op_type, name=name, input=inputs, output=[name])
        for key, value in attrs.items():
            node.attribute.append(helper.make_attribute(key, value))
        first = min(readers, key=lambda layer: self._model.layer_by_id[layer].index)
        self._before.setdefault(first, []).append(node)
        for reader in readers:
            target = self._nodes[reader]
            for index, tensor in enumerate(target.input):
                if tensor == inputs[0]:
                    target.input[index] = name
        return name

    def finish(self) -> Model:
        """The edited model. It has no fingerprint before it is saved and loaded."""
        graph = self._proto.graph
        for tensor in graph.initializer:
            if tensor.name in self._own:
                self._weights.pop(tensor.name, None)
                tensor.CopyFrom(initializer(tensor.name, self._own[tensor.name], self._weights))
        ordered = [n for node in list(graph.node) for n in (*self._before.get(node.name, ()), node)]
        del graph.node[:]
        graph.node.extend(ordered)
        return Model(self._model.path, self._proto, self._weights, "")

    def _store(self, name: str, values: Float) -> None:
        self._own[name] = values = np.ascontiguousarray(values, np.float32)
        if name not in {tensor.name for tensor in self._proto.graph.initializer}:
            self._proto.graph.initializer.append(TensorProto(name=name))
        for declared in [v for v in self._proto.graph.input if v.name == name]:
            self._proto.graph.input.remove(declared)  # its shape may be another now, and nothing needs it
