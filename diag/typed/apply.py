"""A precision plan, resolved to a format for each layer, applied as one ONNX rewrite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from diag.errors import ModelError
from diag.model import shapes
from diag.model.graph import FLOAT_TYPES, Layer, Model, TensorInfo
from diag.model.load import OPSETS
from diag.numerics.formats import BLOCK_FORMATS, FORMATS
from diag.typed.blocks import WEIGHT, BlockLayers, BlockTuning, block_layers
from diag.typed.fused import Scales, common_scales, without_fused
from diag.typed.operands import Operand, brings_quantizers, operand_notes, quantized_operands
from diag.typed.passes.correct_bias import correct_bias
from diag.typed.passes.insert_blocks import insert_blocks
from diag.typed.passes.insert_qdq import Ratios, insert_qdq
from diag.typed.passes.lift_constants import lift_constants
from diag.typed.passes.lower_floats import OutOfRange, lower_floats
from diag.typed.passes.move_quantizers import move_quantizers
from diag.typed.passes.raise_opset import owners, raise_opset
from diag.typed.schemas import first_opset, op_types
from diag.typed.surgeon import FORMAT_KEY, Surgery
from diag.typed.types import complete

_TF32_NOTE = (
    "ONNX has no such type, so the file says FP32; TensorRT multiplies every FP32 layer in TF32 unless it is "
    "built with --no-tf32"
)

_HALF = {int(TensorProto.FLOAT16): "fp16", int(TensorProto.BFLOAT16): "bf16"}

_PER_CHANNEL_QDQ_OPSET = 13
_QDQ19_OPSET = 19
"""From opset 19 codes may be FP8, and scales FP16 or BF16, and then the dequantized values are too."""

_BLOCK_OPSET = {"int4": 21, "mxfp8": 19, "nvfp4": 23}
"""First opset with the type of a block format's codes, and with blocks where they are ONNX's own."""


@dataclass(frozen=True)
class TypedModel:
    """The model after the plan was applied."""

    proto: ModelProto
    weights: Mapping[str, NDArray[np.generic]]
    formats: Mapping[str, str]
    """Format of each layer as built (a layer whose operator has no such format stays FP32)."""
    notes: tuple[str, ...]
    fused: bool = False
    """Whether engines get the quantizers where they fuse them; `proto` has them at the layers that read them,
    where their error belongs to the layer."""

    @property
    def model(self) -> Model:
        """The typed graph as a model; it has no fingerprint."""
        return Model("typed", self.proto, self.weights, "")

    @cached_property
    def for_engines(self) -> ModelProto:
        """What every engine runs, and what is written to a file: the numbers are those of `proto`."""
        if not self.fused:
            return self.proto
        moved = move_quantizers(self.proto)
        check(moved)
        return moved


def operands_of(
    model: Model, formats: Mapping[str, str], types: Mapping[str, TensorInfo], fused: bool = False
) -> tuple[Operand, ...]:
    """Operands that will carry a quantizer under `formats`; the activations among them need scales.

    Weights in blocks, and what is quantized with scales found while the engine runs, are not among them.
    `fused`: as the plan's placement of that name has it.
    """
    known = complete(types, model)
    return (*_plain_operands(model, formats, known, fused), *block_layers(model, formats, known).operands())


def _plain_operands(
    model: Model, formats: Mapping[str, str], types: Mapping[str, TensorInfo], fused: bool
) -> tuple[Operand, ...]:
    quantized = _quantized(formats)
    found = quantized_operands(model, quantized, types)
    return without_fused(model, found, quantized) if fused else found


def _quantized(formats: Mapping[str, str]) -> dict[str, str]:
    """Formats of layers with one scale for each tensor or channel."""
    chosen = {layer: fmt for layer, fmt in formats.items() if FORMATS[fmt].quantized}
    return {layer: fmt for layer, fmt in chosen.items() if fmt not in BLOCK_FORMATS}


def apply_formats(
    model: Model,
    formats: Mapping[str, str],
    *,
    base: str = "fp32",
    scales: Scales | None = None,
    out_of_range: OutOfRange = "clamp",
    block_size: int | None = None,
    tuning: BlockTuning | None = None,
    weight_ratios: Ratios | None = None,
    corrections: Mapping[str, NDArray[np.float32]] | None = None,
    fused: bool = False,
) -> TypedModel:
    """Rewrite `model` so that each layer computes in its format; `formats` holds every layer id.

    `scales` gives the step of each quantized activation, by format and tensor; `block_size` is that of INT4
    (see `block_layers`), and `tuning` what a search found for it; `weight_ratios` a weight's factors, one for
    each channel, by which its steps are smaller than min-max; `corrections` what is added to a layer's output
    (see `correct_bias`); `fused` asks for the placement of that name.

    Raises PlanError for blocks that do not fit, TableError for a missing scale, ModelError when the result
    does not pass ONNX's checker.
    """
    types = complete(shapes.infer(model), model)
    operands = _plain_operands(model, formats, types, fused)
    blocks = block_layers(model, formats, types, block_size)
    floats, notes = _float_formats(model, formats, base, types)
    tuning = tuning or BlockTuning()
    notes += [*operand_notes(model, _quantized(formats), types), *blocks.notes, *tuning.notes(blocks.layers)]
    corrected = correct_bias(model, corrections or {})
    raised = _raised(corrected, _needed_opset(model, floats, formats, operands, blocks))
    surgery = Surgery.open(raised.proto, raised.weights)
    lift_constants(surgery)
    keep = {(o.layer, o.input) for o in operands if o.weight is not None}
    keep |= {(x.layer, WEIGHT) for x in blocks.layers}
    if raised is not model:
        types = complete(shapes.infer(raised), raised)
    of_nodes = {name: floats[x.id] for name, x in owners(raised.proto, model).items() if x.id in floats}
    lower_floats(surgery, raised, of_nodes, types, keep, out_of_range)
    quantized = {o.layer: formats[o.layer] for o in operands}
    if fused:
        scales = common_scales(model, [(o, formats[o.layer]) for o in operands], scales or {})
    insert_qdq(surgery, operands, quantized, floats, scales or {}, weight_ratios or {})
    insert_blocks(surgery, blocks.layers, floats, (scales or {}).get("nvfp4", {}), tuning)
    quantized |= {x.layer: x.format for x in blocks.layers}
    result = surgery.close()
    tf32 = _marked_tf32(result, model, formats, types)
    notes += [f"{len(tf32)} layer(s) in TF32: {_TF32_NOTE}"] if tf32 else []
    check(result)
    brought = {x.id for x in model.layers if brings_quantizers(model, x)}
    quantized |= {x: fmt for x, fmt in formats.items() if x in brought and FORMATS[fmt].quantized}
    chosen = {**floats, **quantized, **tf32}
    built = {x.id: chosen.get(x.id) or own_format(x, types) for x in model.layers}
    return TypedModel(result, surgery.weights, built, tuple(notes), fused)


def _raised(model: Model, opset: int) -> Model:
    proto = raise_opset(model.proto, opset)
    return model if proto is model.proto else Model(model.path, proto, model.weights, model.sha256)


def _float_formats(
    model: Model, formats: Mapping[str, str], base: str, types: Mapping[str, TensorInfo]
) -> tuple[dict[str, str], list[str]]:
    """FP16 or BF16 format of each layer that has one; notes on operators that cannot compute in it."""
    wanted: dict[str, str] = {}
    refused: dict[tuple[str, str], int] = {}
    own = 0
    for layer in model.layers:
        fmt = formats.get(layer.id, "fp32")
        fmt = base if FORMATS[fmt].quantized else fmt
        if fmt in ("fp32", "tf32") or model.value_dependent.isdisjoint(layer.outputs):
            continue
        if own_format(layer, types) != "fp32":
            own += 1
            continue
        if layer.domain or first_opset(layer.op_type, fmt, model.opset) is None:
            refused[layer.op_type, fmt] = refused.get((layer.op_type, fmt), 0) + 1
        else:
            wanted[layer.id] = fmt
    notes = [
        f"{n} {op} layer(s) stay FP32: ONNX defines no {fmt} for {op}"
        for (op, fmt), n in refused.items()
        if _computes_floats(op)
    ]
    if own:
        notes.append(f"{own} layer(s) keep the 16-bit floats that the model gives them")
    return wanted, notes


def _marked_tf32(
    proto: ModelProto, model: Model, formats: Mapping[str, str], types: Mapping[str, TensorInfo]
) -> dict[str, str]:
    """Say TF32 in the metadata of nodes that are to multiply in it, for ONNX has no such type."""
    wanted = {x.id for x in model.layers if formats.get(x.id) == "tf32" and own_format(x, types) == "fp32"}
    for node in proto.graph.node:
        if node.name in wanted:
            node.metadata_props.add(key=FORMAT_KEY, value="tf32")
    return dict.fromkeys(wanted, "tf32")


def own_format(layer: Layer, types: Mapping[str, TensorInfo]) -> str:
    """Format in which the model itself computes a layer: fp32 unless all its floats are 16 bits wide."""
    found = {types[name].elem_type for name in (*layer.reads, *layer.outputs) if name in types} & FLOAT_TYPES
    return _HALF[found.pop()] if len(found) == 1 and found <= _HALF.keys() else "fp32"


def _computes_floats(op_type: str) -> bool:
    return op_types(op_type, "", OPSETS[-1], "fp32") is not None


def _needed_opset(
    model: Model,
    floats: Mapping[str, str],
    formats: Mapping[str, str],
    operands: tuple[Operand, ...],
    blocks: BlockLayers,
) -> int:
    needed = [model.opset, *(_BLOCK_OPSET[x.format] for x in blocks.layers)]
    for layer_id, fmt in floats.items():
        needed.append(first_opset(model.layer_by_id[layer_id].op_type, fmt, model.opset) or model.opset)
    if operands:
        needed.append(_PER_CHANNEL_QDQ_OPSET)
        if any(operand.layer in floats or formats.get(operand.layer) == "fp8" for operand in operands):
            needed.append(_QDQ19_OPSET)
    return max(needed)


def check(proto: ModelProto) -> None:
    """ONNX's checker with full type and shape inference. Raises ModelError with its first complaint.

    Initializers kept beside the graph are checked as inputs of the same type and shape. Outputs without a
    shape, which the checker refuses and every engine accepts, are left out where none can be inferred.
    """
    probe = ModelProto()
    probe.CopyFrom(proto)
    stubs = [t for t in probe.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    for tensor in stubs:
        probe.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
        probe.graph.initializer.remove(tensor)
    try:
        if not all(_has_shape(value) for value in probe.graph.output):
            probe = onnx.shape_inference.infer_shapes(probe)
            for value in [value for value in probe.graph.output if not _has_shape(value)]:
                probe.graph.output.remove(value)
        onnx.checker.check_model(probe, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(
            f"the rewritten model fails ONNX's checker: {str(error).strip().splitlines()[0]}"
        ) from error


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.HasField("shape"))
