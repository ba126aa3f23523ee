"""Which kernels run an ONNX node, and in which type it was built."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diag.kernels.kernel import WIDTH_BITS, Kernel, Tensor

MULTIPLYING_OPS = frozenset(
    {
        "MatMul",
        "Gemm",
        "Conv",
        "ConvTranspose",
        "MatMulInteger",
        "QLinearMatMul",
        "QLinearConv",
        "ConvInteger",
    }
)
"""ONNX operators that a GEMM or convolution kernel runs; a precision plan speaks of these first."""

_WEIGHT_ONLY = frozenset({"int4", "fp4"})


@dataclass(frozen=True, slots=True)
class NodeMap:
    """Where each ONNX node of a model went."""

    kernels_of: Mapping[str, tuple[Kernel, ...]]
    """Node to the kernels that name it, in execution order; every mapped node has at least one."""
    folded: tuple[str, ...]
    """Nodes that no kernel names: computed at build time, or turned into a view of another tensor."""
    foreign: tuple[str, ...]
    """Names in the kernels that are no nodes of the model: quantizers and casts that a rewrite put in."""

    @property
    def coverage(self) -> float:
        """Share of the nodes that a kernel names; 1.0 for a model without nodes."""
        total = len(self.kernels_of) + len(self.folded)
        return len(self.kernels_of) / total if total else 1.0

    def main(self, node: str, op_type: str = "") -> Kernel | None:
        """The kernel that does the node's work; None when the node was folded away.

        TensorRT also names a node in kernels that only prepare its input or finish its output. For a
        multiplying operator it is the kernel that multiplies; among several, the one that bears its name.
        """
        found = self.kernels_of.get(node, ())
        if op_type in MULTIPLYING_OPS:
            found = tuple(k for k in found if k.multiplies) or found
        return next((k for k in found if _bears(k, node)), found[0] if found else None)


def _bears(kernel: Kernel, node: str) -> bool:
    """Whether the kernel's name holds the node's; TensorRT 10 writes an underscore for a dot."""
    return node in kernel.name or node.replace(".", "_") in kernel.name


def map_nodes(kernels: Sequence[Kernel], node_names: Iterable[str]) -> NodeMap:
    """Map ONNX nodes to kernels. Leave Constant nodes out of `node_names`, or they count as folded."""
    named: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        for node in kernel.nodes:
            named[node].append(kernel)
    names = tuple(dict.fromkeys(node_names))
    known = frozenset(names)
    return NodeMap(
        kernels_of={name: tuple(named[name]) for name in names if name in named},
        folded=tuple(name for name in names if name not in named),
        foreign=tuple(name for name in named if name not in known),
    )


def operand_types(kernel: Kernel) -> frozenset[str]:
    """Types of the matrices that a multiplying kernel reads, weights included; biases and scales left out."""
    return frozenset(t.dtype for t in kernel.inputs if _carries(t) and (t.is_matrix or t.name == "weights"))


def multiplied_in(kernel: Kernel) -> str:
    """Type in which a multiplying kernel takes its operands; '' when nothing tells.

    The tactic's name decides where it speaks. Otherwise the operands: the narrowest activation (a wider one
    is a residual or a mask that was fused in), or the weights where they are wider (then a narrow input is
    dequantized on the way). INT4 weights give `int4`: only the weights are quantized.
    """
    weights = [
        t.dtype for t in kernel.inputs if t.constant and _carries(t) and (t.is_matrix or t.name == "weights")
    ]
    weight = min(weights, key=WIDTH_BITS.__getitem__, default="")
    if weight in _WEIGHT_ONLY:
        return weight
    if kernel.math_type:
        return "fp32" if kernel.math_type == "tf32" else kernel.math_type
    activations = [t.dtype for t in kernel.inputs if not t.constant and _carries(t) and t.is_matrix]
    activation = min(activations, key=WIDTH_BITS.__getitem__, default="")
    if not (activation and weight):
        return activation or weight
    return max(activation, weight, key=WIDTH_BITS.__getitem__)


def _carries(tensor: Tensor) -> bool:
    return tensor.dtype in WIDTH_BITS and not tensor.is_scalar


def built_types(node_map: NodeMap, op_types: Mapping[str, str]) -> dict[str, str]:
    """Type in which each mapped node was built; nodes that were folded away are absent.

    For a multiplying operator see `multiplied_in`. For any other, the narrowest type that its main kernel
    writes: what the rest of the engine sees of it.
    """
    found: dict[str, str] = {}
    for node in node_map.kernels_of:
        op_type = op_types.get(node, "")
        kernel = node_map.main(node, op_type)
        if kernel is None:
            continue
        if op_type in MULTIPLYING_OPS:
            found[node] = multiplied_in(kernel)
        else:
            written = [t.dtype for t in kernel.outputs if t.dtype in WIDTH_BITS]
            found[node] = min(written, key=WIDTH_BITS.__getitem__, default="")
    return found
