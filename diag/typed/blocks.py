"""Which layers get weights in blocks, and how the blocks are cut.

TensorRT's rules: blocks lie along the reduction axis, which is one of the last two; INT4 takes blocks of 64
or 128 (TensorRT-RTX also 32) and weights only; MXFP8 takes 32 and NVFP4 16, and both quantize the activation
too, while the engine runs, if it has two or three dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from diag.errors import PlanError
from diag.model.graph import MATRIX_OPS, Layer, Model, TensorInfo
from diag.numerics.blocks import MXFP8_BLOCK, NVFP4_BLOCK
from diag.numerics.formats import BLOCK_FORMATS
from diag.typed.operands import Operand, brings_quantizers, constant_value, weight_axis

INT4_BLOCKS = (128, 64, 32)
"""Tried in this order where the plan names none."""

_TRT_NOTE = (
    "MXFP8 and NVFP4 scale activations while the engine runs, for which ONNX has no operator: the file holds "
    "TensorRT's own (domain trt), which TensorRT and TensorRT-RTX read and ONNX Runtime does not"
)

WEIGHT = 1
"""Input of MatMul and Gemm where the weights are."""

_RANKS = (2, 3)
"""Dimensions of what TensorRT quantizes while it runs."""


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """A MatMul or Gemm whose weights are stored in blocks."""

    layer: str
    format: str
    tensor: str
    """Name of the weights."""
    weight: NDArray[np.generic]
    axis: int
    """Reduction axis of `weight`."""
    size: int
    """Elements of a block."""
    source: str
    """Tensor that the weights are multiplied with."""
    dynamic: bool = False
    """Whether `source` is quantized while the engine runs."""
    rank: int = 0
    """Dimensions of `source` where the graph leaves the length of the last one open, else 0: TensorRT must
    know it when it builds."""


@dataclass(frozen=True)
class BlockTuning:
    """What a search found for INT4 weights (`diag.numerics.awq`)."""

    factors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """By input tensor: its channels are divided by these, and the weights multiplied."""
    ratios: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """By layer: by how much the steps of its blocks are smaller, shape (blocks, outputs)."""

    def notes(self, layers: Sequence[BlockLayer]) -> list[str]:
        """What is said of nodes that the scales add."""
        scaled = [x for x in layers if x.format == "int4" and x.source in self.factors]
        inputs = len({x.source for x in scaled})
        return [f"{inputs} Mul(s) undo the scales of {len(scaled)} INT4 layer(s) at their inputs"] * bool(
            scaled
        )


@dataclass(frozen=True)
class BlockLayers:
    """The layers of a model that can have blocks, in graph order, and sentences on those that cannot."""

    layers: tuple[BlockLayer, ...] = ()
    notes: tuple[str, ...] = ()

    def operands(self) -> tuple[Operand, ...]:
        """Activations that need a scale measured beforehand: NVFP4's, which have one for the tensor."""
        return tuple(Operand(x.layer, 0, x.source, None, None) for x in self.layers if x.format == "nvfp4")


def block_layers(
    model: Model,
    formats: Mapping[str, str],
    types: Mapping[str, TensorInfo],
    block_size: int | None = None,
) -> BlockLayers:
    """Layers whose format in `formats` is a block format. Layers that cannot have it stay in the base format.

    Raises PlanError when `block_size` is given and does not divide a layer's reduction axis.
    """
    found: list[BlockLayer] = []
    refused: dict[str, list[str]] = {}
    for layer in model.layers:
        fmt = formats.get(layer.id, "")
        if fmt not in BLOCK_FORMATS or brings_quantizers(model, layer):
            continue
        result = _block_layer(model, layer, fmt, types, block_size)
        if isinstance(result, BlockLayer):
            found.append(result)
        else:
            refused.setdefault(f"{fmt.upper()}: {result}", []).append(layer.id)
    notes = tuple(
        f"{len(names)} layer(s) are not quantized to {why}, first {names[0]}"
        for why, names in refused.items()
    )
    if any(x.dynamic for x in found):
        notes += (_TRT_NOTE,)
    return BlockLayers(tuple(found), notes)


def _block_layer(
    model: Model, layer: Layer, fmt: str, types: Mapping[str, TensorInfo], block_size: int | None
) -> BlockLayer | str:
    """The layer, or in words why it cannot have blocks."""
    if layer.op_type not in MATRIX_OPS or layer.domain:
        return "only MatMul and Gemm have blocks"
    name = layer.inputs[WEIGHT]
    weight = constant_value(model, name)
    if weight is None or weight.dtype != np.float32 or weight.ndim < 2:
        return "the weights are no float constant of two or more dimensions"
    axis = 2 * weight.ndim - 3 - weight_axis(layer, WEIGHT, weight.ndim)
    size = _block_size(fmt, weight.shape[axis], layer.id, block_size)
    if not size:
        return f"a reduction over {weight.shape[axis]} elements does not divide into blocks"
    plain = BlockLayer(layer.id, fmt, name, weight, axis, size, layer.inputs[0])
    if fmt == "int4":
        return plain
    activation = types.get(layer.inputs[0])
    trouble = _dynamic_trouble(layer, activation, weight.ndim)
    if trouble or activation is None or activation.shape is None:
        return trouble
    known = isinstance(activation.shape[-1], int)
    return replace(plain, dynamic=True, rank=0 if known else len(activation.shape))


def _dynamic_trouble(layer: Layer, activation: TensorInfo | None, weight_rank: int) -> str:
    """Why TensorRT cannot quantize the layer's activation while it runs; empty when it can."""
    if activation is None or activation.elem_type != TensorProto.FLOAT:
        return "the activation is no float"
    if activation.shape is None or len(activation.shape) not in _RANKS:
        return "TensorRT quantizes activations of two or three dimensions while it runs"
    if layer.attributes.get("transA", 0) or weight_rank not in _RANKS:
        return "the activation's last axis is not the reduction"
    return ""


def _block_size(fmt: str, length: int, layer: str, asked: int | None) -> int:
    """Block size for a reduction over `length` elements, 0 when there is none."""
    if fmt != "int4":
        size = MXFP8_BLOCK if fmt == "mxfp8" else NVFP4_BLOCK
        return 0 if length % size else size
    if asked is None:
        return next((size for size in INT4_BLOCKS if length % size == 0), 0)
    if length % asked:
        raise PlanError(
            f"blocks of {asked} do not divide the {length} elements that layer {layer!r} reduces over",
            "Give another quantizer.block_size, none (then it is chosen for each layer), or pin the layer.",
        )
    return asked
