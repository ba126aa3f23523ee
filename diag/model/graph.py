"""The model and its layers, as plain facts about an ONNX graph. Nothing here runs or changes a model."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

from diag.errors import ModelError
from diag.model.source import Source, source_of

FLOAT_TYPES = frozenset(
    {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
)  # types whose values a precision plan may lower

LINEAR_OPS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Operators whose operands a format for operands (int8, fp8, tf32) means as a default."""

MATRIX_OPS = frozenset({"MatMul", "Gemm"})
"""Those of them whose operands are matrices, which formats with a scale for each block mean."""

SHAPE_OF_VALUES = frozenset({"Shape", "Size"})  # their outputs depend on shapes, not on values


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, or the first of `name#2`, `name#3`, ... that is not in `taken`."""
    numbered = (f"{name}#{count}" for count in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor: ONNX element type (0: unknown) and shape.

    `shape` is None when the rank is unknown; a dimension is an int, a symbolic name, or None.
    """

    elem_type: int
    shape: tuple[int | str | None, ...] | None

    @property
    def is_float(self) -> bool:
        return self.elem_type in FLOAT_TYPES


@dataclass(frozen=True, slots=True)
class Layer:
    """An ONNX node of the main graph with its outputs; If, Loop and Scan count as one layer."""

    id: str
    index: int
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    """Tensor names; an absent optional input is an empty string."""
    outputs: tuple[str, ...]
    captured: tuple[str, ...] = ()
    """Outer tensors that the layer's subgraphs read."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Scalar and list attributes; graphs and tensors are left in the proto."""
    source: Source | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Every tensor the layer depends on, absent inputs left out."""
        return tuple(name for name in (*self.inputs, *self.captured) if name)


@dataclass(frozen=True)
class Model:
    """An ONNX model whose large initializers are kept beside the graph.

    `proto` holds the graph with large initializers as external stubs; treat it as read-only.
    `weights` maps every such initializer to its values (memory-mapped where the file allows it).
    """

    path: str
    proto: onnx.ModelProto
    weights: Mapping[str, NDArray[np.generic]]
    sha256: str

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(_layer(index, node) for index, node in enumerate(self.proto.graph.node))

    @cached_property
    def layer_by_id(self) -> dict[str, Layer]:
        return {layer.id: layer for layer in self.layers}

    @cached_property
    def producers(self) -> dict[str, Layer]:
        """Tensor name to the layer that writes it."""
        return {name: layer for layer in self.layers for name in layer.outputs if name}

    @cached_property
    def consumers(self) -> dict[str, tuple[Layer, ...]]:
        """Tensor name to the layers that read it, in graph order, each once."""
        found: dict[str, dict[str, Layer]] = {}
        for layer in self.layers:
            for name in layer.reads:
                found.setdefault(name, {})[layer.id] = layer
        return {name: tuple(layers.values()) for name, layers in found.items()}

    @cached_property
    def initializers(self) -> dict[str, TensorProto]:
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    @cached_property
    def inputs(self) -> dict[str, TensorInfo]:
        """Graph inputs that the user must feed (initializers left out), in order."""
        given = self.initializers
        return {v.name: value_info(v) for v in self.proto.graph.input if v.name not in given}

    @cached_property
    def outputs(self) -> dict[str, TensorInfo]:
        return {v.name: value_info(v) for v in self.proto.graph.output}

    @cached_property
    def opset(self) -> int:
        return int(next(o.version for o in self.proto.opset_import if o.domain in ("", "ai.onnx")))

    @cached_property
    def value_dependent(self) -> frozenset[str]:
        """Tensors whose values depend on the values (not only the shapes) of graph inputs."""
        dependent = set(self.inputs)
        for layer in self.layers:
            if layer.op_type not in SHAPE_OF_VALUES and not dependent.isdisjoint(layer.reads):
                dependent.update(name for name in layer.outputs if name)
        return frozenset(dependent)

    @cached_property
    def constants(self) -> dict[str, NDArray[np.generic]]:
        """Values of initializers and of Constant nodes, by tensor name (read on first use)."""
        return _Constants(self)

    def constant(self, name: str) -> NDArray[np.generic] | None:
        """The constant called `name`, or None when it is computed or fed."""
        return self.constants.get(name)


class _Constants(dict[str, NDArray[np.generic]]):
    """Decodes each constant when it is first asked for."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        nodes = model.proto.graph.node
        self._nodes = {n.output[0]: n for n in nodes if n.op_type == "Constant" and n.output}

    def __contains__(self, name: object) -> bool:
        return name in self._nodes or name in self._model.initializers

    def __missing__(self, name: str) -> NDArray[np.generic]:
        if name not in self:
            raise KeyError(name)
        try:
            self[name] = value = self._decoded(name)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise ModelError(
                f"constant {name!r} is malformed: {error}", "The model is damaged; export it again."
            ) from error
        return value

    def _decoded(self, name: str) -> NDArray[np.generic]:
        if name in self._model.weights:
            return self._model.weights[name]
        if name in self._model.initializers:
            return numpy_helper.to_array(self._model.initializers[name])
        return constant_node_value(self._nodes[name])

    def get(self, name: str, default: object = None) -> NDArray[np.generic] | None:  # type: ignore[override]
        return self[name] if name in self else None  # noqa: SIM401 (get must decode, as [] does)


def constant_node_value(node: NodeProto) -> NDArray[np.generic]:
    """Value of an ONNX Constant node, whichever of its attributes holds it."""
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return numpy_helper.to_array(value)
    if attribute.name in ("value_float", "value_floats"):
        return np.asarray(value, np.float32)
    if attribute.name in ("value_int", "value_ints"):
        return np.asarray(value, np.int64)
    return np.asarray(value, dtype=object)


def value_info(value: onnx.ValueInfoProto) -> TensorInfo:
    """Element type and shape of a graph input, output or inferred tensor."""
    if not value.type.HasField("tensor_type"):
        return TensorInfo(0, None)
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorInfo(tensor.elem_type, None)
    return TensorInfo(tensor.elem_type, tuple(_dim(d) for d in tensor.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) if dim.HasField("dim_param") and dim.dim_param else None


def _layer(index: int, node: NodeProto) -> Layer:
    return Layer(
        id=node.name,
        index=index,
        op_type=node.op_type,
        domain="" if node.domain == "ai.onnx" else node.domain,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        captured=captured_names(node),
        attributes=_plain_attributes(node),
        source=source_of(node),
    )


def _plain_attributes(node: NodeProto) -> dict[str, object]:
    heavy = (AttributeProto.GRAPH, AttributeProto.GRAPHS, AttributeProto.TENSOR, AttributeProto.TENSORS)
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type not in heavy}


def captured_names(node: NodeProto) -> tuple[str, ...]:
    """Names that the node's subgraphs read from outside, in order of first use."""
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        for inner in graph.node:
            for name in (*inner.input, *captured_names(inner)):
                if name and name not in inside:
                    found[name] = None
            inside.update(inner.output)
        found.update({v.name: None for v in graph.output if v.name not in inside})
    return tuple(found)


def subgraphs(node: NodeProto) -> Iterable[GraphProto]:
    """Graphs in the node's attributes (branches of an If, body of a Loop or Scan)."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs
