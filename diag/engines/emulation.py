"""The typed model as ONNX Runtime can emulate it: every node in FP32, every tensor rounded to its format.

ONNX Runtime on a CPU computes chains of FP16 nodes in FP32 and rounds only at their ends, which hides
overflow; and it has hardly any BF16 kernels. Here each node's output is rounded by a pair of Casts, which
ONNX Runtime leaves alone. Quantizers of activations stay as they are; weights are dequantized beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from diag.engines.block_quantizers import BlockQuantizer
from diag.model import shapes
from diag.model.graph import Model, TensorInfo, constant_node_value
from diag.model.load import drop_unused, initializer, stub
from diag.numerics.blocks import E8M0, dequantize_blocks
from diag.numerics.formats import dequantize, round_tf32
from diag.typed.passes.insert_blocks import TRT_DOMAIN
from diag.typed.surgeon import FORMAT_KEY, NAMESPACE
from diag.typed.types import complete

_DEQUANTIZERS = frozenset({"DequantizeLinear", "TRT_MXFP8DequantizeLinear"})
_DYNAMIC_QUANTIZERS = frozenset({"TRT_MXFP8DynamicQuantize", "TRT_FP4DynamicQuantize"})

HALF_TYPES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

EXACT_OPS = frozenset(
    [
        "Abs",
        "Clip",
        "Compress",
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Max",
        "MaxPool",
        "Min",
        "Neg",
        "Pad",
        "Relu",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
        "ReduceMax",
        "ReduceMin",
    ]
)
"""Operators that only move or select values: their outputs are in the format because their inputs are."""


@dataclass
class Emulation:
    """An FP32 graph that computes what the typed model computes, with detached weights.

    `half` gives, for each tensor that is FP16 or BF16 in the typed model, that ONNX element type.
    """

    proto: ModelProto
    weights: dict[str, NDArray[np.generic]]
    half: dict[str, int]


def emulate(typed: Model) -> Emulation:
    """Emulation of a typed model. Tensor names stay; what a pair of Casts would only copy is merged."""
    builder = _Builder(typed, complete(shapes.infer(typed), typed))
    for node in typed.proto.graph.node:
        builder.visit(node)
    return builder.finish()


@dataclass
class _Builder:
    typed: Model
    types: Mapping[str, TensorInfo]
    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    """Inserted tensor to the tensor that holds the same FP32 values."""
    quantized: dict[str, NodeProto] = field(default_factory=dict)
    """Outputs of TensorRT's dynamic quantizers: their codes and scales."""
    shared: dict[str, TensorProto] = field(default_factory=dict)
    """Small constants that are the emulation's own."""
    rounded: set[str] = field(default_factory=set)
    """Tensors rounded to TF32."""

    def visit(self, node: NodeProto) -> None:
        if node.domain == TRT_DOMAIN and node.op_type in _DYNAMIC_QUANTIZERS:
            self.quantized.update(dict.fromkeys(node.output, node))
        elif node.op_type in _DEQUANTIZERS and node.input[0] in self.quantized:
            self._quantize_in_blocks(node)
        elif node.op_type == "Cast" and self._is_half_input(node) and _target(node) == TensorProto.FLOAT:
            self._merge_or_copy(node)
        elif node.op_type in _DEQUANTIZERS and node.input[0] in self.typed.constants:
            self._fold_weight(node)
        elif node.op_type == "Cast" and _target(node) in HALF_TYPES:
            self._round_through(node, _target(node))
        else:
            self._compute(node)

    def _half(self, name: str) -> int:
        elem_type = self.types[name].elem_type if name in self.types else 0
        return elem_type if elem_type in HALF_TYPES else 0

    def _is_half_input(self, node: NodeProto) -> bool:
        return bool(self._half(node.input[0]))

    def _merge_or_copy(self, node: NodeProto) -> None:
        """Widening changes no value: a Cast that the rewrite added disappears."""
        source, target = node.input[0], node.output[0]
        if not node.name.startswith(f"{NAMESPACE}/"):
            self.nodes.append(helper.make_node("Identity", [source], [target], name=node.name))
        elif any(target == value.name for value in self.typed.proto.graph.output):
            self.alias[source] = target
        else:
            self.alias[target] = source

    def _fold_weight(self, node: NodeProto) -> None:
        given = {a.name: a.i for a in node.attribute}
        codes, scale = self._constant(node.input[0]), self._constant(node.input[1])
        if node.op_type == "TRT_MXFP8DequantizeLinear":
            scale = scale.view(E8M0)  # TensorRT stores it as UINT8
        steps = np.asarray(scale, np.float32)
        size, axis = given.get("block_size", 0), given.get("axis", 1)
        if size:
            values = dequantize_blocks(codes, steps, axis % codes.ndim, size)
        else:
            values = dequantize(codes, steps, axis if steps.ndim else None)
        self.weights[node.output[0]] = _rounded(values, self._half(node.output[0]))

    def _constant(self, name: str) -> NDArray[np.generic]:
        """A constant of the typed model, or one that was dequantized before (NVFP4 has two scales)."""
        return self.weights[name] if name in self.weights else np.asarray(self.typed.constants[name])

    def _quantize_in_blocks(self, node: NodeProto) -> None:
        """From a dynamic quantizer's input to what the dequantizer behind it hands on, in one go."""
        quantizer = self.quantized[node.input[0]]
        if node.input[0] != quantizer.output[0]:
            return  # NVFP4's block scales on their way to the elements
        source, target = quantizer.input[0], node.output[0]
        half = self._half(target)
        size = next(a.i for a in quantizer.attribute if a.name == "block_size")
        shape = self.types[source].shape
        assert shape is not None
        wide = f"{target}/wide" if half else target
        emitter = BlockQuantizer(source, wide, len(shape), size, self.typed.opset, self._shared)
        is_mxfp8 = quantizer.op_type == "TRT_MXFP8DynamicQuantize"
        self.nodes.extend(emitter.mxfp8() if is_mxfp8 else emitter.nvfp4(quantizer.input[1]))
        self.nodes.extend(rounding(wide, target, half, node.name) if half else ())

    def _shared(self, values: NDArray[np.generic]) -> str:
        """A constant of the emulation's own; equal ones are one."""
        name = f"{NAMESPACE}/constant/{values.dtype}/{values.tolist()}"
        self.shared[name] = numpy_helper.from_array(values, name)
        return name

    def _round_through(self, node: NodeProto, half: int) -> None:
        wide = f"{node.output[0]}/wide"
        if self._is_half_input(node) or self.types[node.input[0]].elem_type == TensorProto.FLOAT:
            wide = node.input[0]
        else:
            self.nodes.append(
                helper.make_node("Cast", [node.input[0]], [wide], name=f"{node.name}/wide", to=1)
            )
        self.nodes.extend(rounding(wide, node.output[0], half, node.name))

    def _compute(self, node: NodeProto) -> None:
        copy = NodeProto()
        copy.CopyFrom(node)
        _widen_attributes(copy)
        if any(entry.key == FORMAT_KEY and entry.value == "tf32" for entry in node.metadata_props):
            self._round_operands(copy)
        self.nodes.append(copy)
        if node.op_type in EXACT_OPS and any(self._half(name) for name in node.input):
            return
        for index, name in enumerate(node.output):
            half = self._half(name)
            if half and node.op_type != "Constant":
                copy.output[index] = f"{name}/wide"
                self.nodes.extend(rounding(f"{name}/wide", name, half, f"{NAMESPACE}/round/{name}"))

    def _round_operands(self, node: NodeProto) -> None:
        """Both operands of a multiplication in TF32, as the tensor cores read them; sums stay FP32."""
        for index, name in enumerate(node.input[:2]):
            target = node.input[index] = f"{name}/tf32"
            if target in self.rounded:
                continue
            self.rounded.add(target)
            if name in self.typed.constants:
                self.weights[target] = round_tf32(np.asarray(self._constant(name), np.float32))
            else:
                splitter = self._shared(np.asarray(TF32_SPLITTER, np.float32))
                self.nodes.extend(tf32_rounding(name, target, splitter))

    def finish(self) -> Emulation:
        proto = ModelProto()
        proto.CopyFrom(self.typed.proto)
        del proto.graph.node[:]
        del proto.graph.value_info[:]
        before, after = self._half_borders()
        proto.graph.node.extend([*before, *_renamed(self.nodes, self.alias), *after])
        kept = [self._widened(tensor) for tensor in self.typed.proto.graph.initializer]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
        folded = [name for name in self.weights if name not in self.typed.initializers]
        proto.graph.initializer.extend(stub(name, self.weights[name]) for name in folded)
        proto.graph.initializer.extend(self.shared.values())
        drop_unused(proto, self.weights)
        half = {self.alias.get(n, n): self._half(n) for n in self.types if self._half(n)}
        return Emulation(proto, self.weights, half)

    def _half_borders(self) -> tuple[list[NodeProto], list[NodeProto]]:
        """Casts from graph inputs and to graph outputs that the user's model itself has in 16 bits."""
        graph = self.typed.proto.graph
        before, after = [], []
        for name in [value.name for value in graph.input if self._half(value.name)]:
            self.alias[name] = f"{name}/wide"
            label = f"{NAMESPACE}/widen/{name}"
            before.append(helper.make_node("Cast", [name], [self.alias[name]], label, to=TensorProto.FLOAT))
        for name in [value.name for value in graph.output if self._half(value.name)]:
            wide = self.alias.setdefault(name, f"{name}/exact")
            label = f"{NAMESPACE}/narrow/{name}"
            after.append(helper.make_node("Cast", [wide], [name], label, to=self._half(name)))
        return before, after

    def _widened(self, tensor: TensorProto) -> TensorProto:
        """The initializer in FP32 if it was a 16-bit float; values beside the graph go to `weights`."""
        name = tensor.name
        if tensor.data_type in HALF_TYPES:
            values = np.asarray(self.typed.constants[name]).astype(np.float32)
            return initializer(name, values, self.weights)
        if name in self.typed.weights:
            self.weights[name] = self.typed.weights[name]
        return tensor


def rounding(source: str, target: str, half: int, name: str) -> list[NodeProto]:
    """A pair of Casts that rounds FP32 values to a 16-bit format, ties to even, overflow to infinity."""
    narrow = f"{target}/narrow"
    return [
        helper.make_node("Cast", [source], [narrow], name=f"{name}/narrow", to=half),
        helper.make_node("Cast", [narrow], [target], name=name, to=TensorProto.FLOAT),
    ]


TF32_SPLITTER = 2**13 + 1
"""c = 8193 x: the difference c - (c - x) keeps the upper 11 of 24 bits (Veltkamp's split)."""


def tf32_rounding(source: str, target: str, splitter: str) -> list[NodeProto]:
    """FP32 arithmetic that rounds to 10 bits of mantissa; values beyond 2^115 overflow in it."""
    steps = (
        ("Mul", [source, splitter], f"{target}/wide"),
        ("Sub", [f"{target}/wide", source], f"{target}/low"),
        ("Sub", [f"{target}/wide", f"{target}/low"], target),
    )
    return [helper.make_node(op_type, inputs, [output], output) for op_type, inputs, output in steps]


def _rounded(values: NDArray[np.float32], half: int) -> NDArray[np.float32]:
    if not half:
        return values
    return values.astype(helper.tensor_dtype_to_np_dtype(half)).astype(np.float32)


def _target(node: NodeProto) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "to"), 0)


def _widen_attributes(node: NodeProto) -> None:
    """Types and tensors in attributes that say 16-bit float say FP32."""
    for attribute in node.attribute:
        if attribute.name in ("dtype", "to", "output_dtype") and attribute.i in HALF_TYPES:
            attribute.i = TensorProto.FLOAT
        elif attribute.HasField("t") and attribute.t.data_type in HALF_TYPES:
            probe = NodeProto(attribute=[attribute])
            attribute.t.CopyFrom(numpy_helper.from_array(constant_node_value(probe).astype(np.float32)))


def _renamed(nodes: Iterable[NodeProto], alias: Mapping[str, str]) -> list[NodeProto]:
    nodes = list(nodes)
    for node in nodes if alias else ():
        rename(node, alias)
    return nodes


def rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename tensors in a node's inputs, outputs and, where they come from outside, in its subgraphs."""
    for field_ in (node.input, node.output):
        for index, name in enumerate(field_):
            if name in names:
                field_[index] = names[name]
    for attribute in node.attribute:
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            _rename_captured(graph, names)


def _rename_captured(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {name for inner in graph.node for name in inner.output}
    outer = {old: new for old, new in names.items() if old not in own}
    for inner in graph.node:
        rename(inner, outer)
    for value in graph.output:
        value.name = outer.get(value.name, value.name)
