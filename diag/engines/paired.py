"""Reference and emulation as one graph: each layer in FP32, in its format with everything before it lowered
(accumulated), and in its format on the reference's inputs (local).

One graph means one pass over the data: weights and shape arithmetic are shared, layers before the first
lowered one are computed once, and the graph can be cut into slices whose tensors fit the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from diag.engines.emulation import Emulation, emulate, rename, rounding
from diag.model.graph import Layer, Model, TensorInfo, captured_names
from diag.model.load import stub
from diag.typed.passes.raise_opset import owners, raise_opset

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Dropout"})
"""Operators that hand on the values of their first input: their error is its error."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What is observed of one output tensor of a layer."""

    layer: str
    tensor: str
    """The user's name; also the reference's name in the paired graph."""
    source: str
    """Tensor that holds the same values (`tensor` itself unless the layer is a view)."""
    emulated: str = ""
    """Name of the accumulated emulation; empty: identical to the reference."""
    local: str = ""
    """Name of the emulation on the reference's inputs; empty: identical to the reference."""
    is_output: bool = False
    """Graph outputs are observed even where they are identical."""


@dataclass
class Group:
    """Nodes of the paired graph that belong to one layer, in topological order."""

    layer: str
    nodes: list[NodeProto] = field(default_factory=list)


@dataclass
class Paired:
    """The paired graph, not yet cut. `header` holds inputs, opsets and initializers, and no nodes."""

    header: ModelProto
    groups: list[Group]
    weights: dict[str, NDArray[np.generic]]
    watches: tuple[Watch, ...]
    types: dict[str, TensorInfo]
    """Type and shape of tensors that may cross a cut; absent where inference does not know them."""


def pair(model: Model, typed: Model, types: Mapping[str, TensorInfo]) -> Paired:
    """Join the reference and the emulation of `typed`, which was rewritten from `model`.

    `types` are those of `model` (see `diag.model.shapes.infer`).
    """
    return Pairing(model, emulate(typed), types).build()


class Pairing:
    """Emits reference and emulation of each layer under names that do not clash."""

    def __init__(self, model: Model, emulation: Emulation, types: Mapping[str, TensorInfo]) -> None:
        self.model = model
        self.emulation = emulation
        self.types = types
        opset = next(o.version for o in emulation.proto.opset_import if o.domain in ("", "ai.onnx"))
        self.reference = raise_opset(model.proto, opset)
        self.reference_nodes = {node.name: node for node in self.reference.graph.node}
        self.emulated_nodes = {node.name: node for node in emulation.proto.graph.node}
        self.emulated_producer = {n: node for node in emulation.proto.graph.node for n in node.output if n}
        self.originals = {name for layer in model.layers for name in layer.outputs if name}
        self.originals |= set(model.inputs)
        self.accumulated: dict[str, str] = {name: name for name in model.inputs}
        """Emulation tensor to its name in the paired graph."""
        self.local: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        self.header = ModelProto()
        self.weights: dict[str, NDArray[np.generic]] = {}
        self.nodes: list[NodeProto] = []

    def build(self) -> Paired:
        """The paired graph of every layer."""
        self.prepare_header()
        groups, watches = [], []
        for layer, nodes in self.reference_groups():
            self.nodes = list(nodes)
            same = self._emulate(layer)
            locals_ = {} if same else self._emulate_locally(layer)
            groups.append(Group(layer.id, self.nodes))
            watches.extend(self._watch(layer, locals_))
        return self.paired(groups, tuple(watches))

    def paired(self, groups: list[Group], watches: tuple[Watch, ...] = ()) -> Paired:
        """What was emitted, as one graph."""
        return Paired(self.header, groups, self.weights, watches, self._types())

    def prepare_header(self) -> None:
        """Inputs, opsets and initializers of the reference and of the emulation."""
        self.header.CopyFrom(self.reference)
        del self.header.graph.node[:]
        del self.header.graph.value_info[:]
        del self.header.graph.output[:]
        self.weights.update(self.model.weights)
        self._adopt_constants()

    def _adopt_constants(self) -> None:
        """Take over the emulation's initializers; those that equal the reference's are shared."""
        own = {tensor.name: tensor for tensor in self.reference.graph.initializer}
        taken = own.keys() | {name for node in self.reference.graph.node for name in node.output}
        for tensor in self.emulation.proto.graph.initializer:
            name = tensor.name
            weight = self.emulation.weights.get(name)
            if name in own and (weight is self.model.weights.get(name) and tensor == own[name]):
                continue
            merged = f"emulated/{name}" if name in taken else name
            self.constants[name] = merged
            if weight is None:
                copy = TensorProto()
                copy.CopyFrom(tensor)
                copy.name = merged
            else:
                self.weights[merged] = weight
                copy = stub(merged, weight)
            self.header.graph.initializer.append(copy)

    def reference_groups(self) -> list[tuple[Layer, list[NodeProto]]]:
        """Nodes of the reference by layer, those among them that an opset conversion added."""
        owner = owners(self.reference, self.model)
        groups: dict[str, tuple[Layer, list[NodeProto]]] = {}
        for node in self.reference.graph.node:
            layer = owner.get(node.name)
            if layer is not None:
                groups.setdefault(layer.id, (layer, []))[1].append(node)
        return list(groups.values())

    def _emulate(self, layer: Layer) -> bool:
        """Emit the accumulated emulation of a layer. True when it is the reference itself."""
        if self._unchanged(layer):
            self.accumulated.update({name: name for name in layer.outputs if name})
            return True
        for name in layer.outputs:
            if name and name in self.emulated_producer:
                self._emit_accumulated(name)
        return False

    def _unchanged(self, layer: Layer) -> bool:
        """Whether the emulated layer has the reference's arithmetic and the reference's inputs."""
        if self.model.value_dependent.isdisjoint(layer.outputs):
            return True
        return self.same_arithmetic(layer) and all(
            self.accumulated.get(name, name) == name for name in layer.reads
        )

    def same_arithmetic(self, layer: Layer) -> bool:
        """Whether the layer computes the same, given the same inputs."""
        node, own = self.emulated_nodes.get(layer.id), self.reference_nodes[layer.id]
        if node is None or node.input != own.input or node.output != own.output:
            return False
        if any(name in self.constants or name in self.emulation.half for name in layer.reads):
            return False
        return not any(name in self.emulation.half for name in layer.outputs)

    def _emit_accumulated(self, name: str) -> str:
        """Name in the paired graph of an emulation tensor, its producers emitted first."""
        if not name:
            return name
        if name in self.accumulated:
            return self.accumulated[name]
        node = self.emulated_producer.get(name)
        if node is None:
            return self.constants.get(name, name)
        self._emit(node, {n: self._emit_accumulated(n) for n in _reads(node)}, "emulated", self.accumulated)
        return self.accumulated[name]

    def _emit(self, node: NodeProto, inputs: Mapping[str, str], prefix: str, names: dict[str, str]) -> None:
        outputs = {name: f"{prefix}/{name}" for name in node.output if name}
        clone = NodeProto()
        clone.CopyFrom(node)
        clone.name = f"{prefix}/{node.name}"
        rename(clone, {**inputs, **outputs})
        self.nodes.append(clone)
        names.update(outputs)

    def _emulate_locally(self, layer: Layer) -> dict[str, str]:
        """Emit the layer on the reference's inputs, if it is lowered; local tensors by output name."""
        if self.same_arithmetic(layer):
            return {}
        if all(self.accumulated.get(n, n) == n for n in layer.reads):
            return {n: self.accumulated[n] for n in layer.outputs if n in self.accumulated}
        return self.emit_locally(layer)

    def emit_locally(self, layer: Layer) -> dict[str, str]:
        """Emit the layer as the plan lowers it, on tensors of the reference's names."""
        made: dict[str, str] = {}
        for name in layer.outputs:
            if name and name in self.emulated_producer:
                self._emit_local_output(name, layer, made)
        return made

    def _emit_local_output(self, name: str, layer: Layer, made: dict[str, str]) -> str:
        """A tensor between the layer's own node and its (rounded) output."""
        if name in made:
            return made[name]
        node = self.emulated_producer[name]
        own = node.name == layer.id
        inputs = {
            n: self._local_input(n)
            if own or n in self.originals or n not in self.emulated_producer
            else self._emit_local_output(n, layer, made)
            for n in _reads(node)
            if n
        }
        self._emit(node, inputs, "local", made)
        return made[name]

    def _local_input(self, name: str) -> str:
        """The reference's tensor as the lowered layer receives it: rounded, or through the quantizer."""
        if name in self.local:
            return self.local[name]
        node = self.emulated_producer.get(name)
        if node is None and name not in self.model.inputs:
            return self.constants.get(name, name)
        if name not in self.originals:
            assert node is not None
            self._emit(node, {n: self._local_input(n) for n in _reads(node) if n}, "received", self.local)
        elif name in self.emulation.half and name in self.model.value_dependent:
            target = f"received/{name}/rounded"
            self.nodes.extend(rounding(name, target, self.emulation.half[name], target))
            self.local[name] = target
        else:
            self.local[name] = name
        return self.local[name]

    def _watch(self, layer: Layer, locals_: Mapping[str, str]) -> list[Watch]:
        """One watch for each float output that depends on the data."""
        watches = []
        for name in layer.outputs:
            info = self.types.get(name)
            if name not in self.model.value_dependent or info is None or not info.is_float:
                continue
            emulated = self.accumulated.get(name, name)
            watches.append(
                Watch(
                    layer.id,
                    name,
                    self._origin(layer, name),
                    "" if emulated == name else emulated,
                    locals_.get(name, ""),
                    name in self.model.outputs,
                )
            )
        return watches

    def _origin(self, layer: Layer, name: str) -> str:
        """Follow views back to the tensor that holds the values."""
        if name in self.model.outputs:
            return name
        while layer.op_type in VIEWS and not layer.domain and layer.inputs[0] in self.model.value_dependent:
            name = layer.inputs[0]
            if name not in self.model.producers:
                break
            layer = self.model.producers[name]
        return name

    def _types(self) -> dict[str, TensorInfo]:
        known = {name: info for name, info in self.types.items() if info.elem_type}
        for names in (self.accumulated, self.local):
            for name, merged in names.items():
                known.setdefault(merged, known.get(name, TensorInfo(TensorProto.FLOAT, None)))
        return known


def _reads(node: NodeProto) -> tuple[str, ...]:
    return (*node.input, *captured_names(node))
