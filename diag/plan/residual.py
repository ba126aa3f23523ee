"""Residual Adds that a fused placement quantizes.

TensorRT fuses an Add into the convolution or product in front of it. With its other input in INT8, and its
result quantized for the layers behind, one kernel reads and writes INT8; with a float input the tensor is
kept twice, in INT8 for the layers behind and in float for the skip (NVIDIA, Working with Quantized Types,
Q/DQ layer-placement recommendations).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from diag.model.fusion import fused_source
from diag.model.graph import LINEAR_OPS, Layer, Model

ACTIVATION_FORMATS = frozenset({"int8", "fp8"})
"""Formats in which activations are quantized."""

FUSED_ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu"})
"""Activation functions that TensorRT fuses behind an Add, whichever the engine."""

_HANDED_ON = FUSED_ACTIVATIONS | {
    "AveragePool",
    "Flatten",
    "GlobalAveragePool",
    "Identity",
    "MaxPool",
    "Reshape",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
"""Operators of one input behind which a quantizer still is the Add's own."""


def residual_adds(
    model: Model, formats: Mapping[str, str], lowerable: Collection[str], pinned: Collection[str]
) -> dict[str, str]:
    """Format of each Add of two activations that a quantized layer is fused with and whose sum is quantized.

    The sum may pass an activation function, pooling and reshapes. Adds in `pinned` are left alone, and so
    are those in front of a norm or a softmax, whose sum stays in float, and those with no layer to be fused
    with (rotary positions).
    """
    found = {}
    for layer in model.layers:
        if layer.op_type != "Add" or layer.domain or layer.id in pinned or layer.id not in lowerable:
            continue
        activations = {name for name in layer.inputs if name in model.value_dependent}
        wanted = set(_wanted(model, layer.outputs[0], formats))
        sources = [fused_source(model, name, LINEAR_OPS) for name in activations]
        fused = any(source is not None and {formats[source.id]} == wanted for source in sources)
        if len(activations) == 2 and fused:
            found[layer.id] = wanted.pop()
    return found


def _wanted(model: Model, tensor: str, formats: Mapping[str, str]) -> Iterator[str]:
    """Quantized formats in which a tensor is read, behind what hands it on too."""
    for reader in model.consumers.get(tensor, ()):
        if _quantizes(reader, tensor, formats):
            yield formats[reader.id]
        elif reader.op_type in _HANDED_ON and not reader.domain and reader.inputs[0] == tensor:
            yield from _wanted(model, reader.outputs[0], formats)


def _quantizes(reader: Layer, tensor: str, formats: Mapping[str, str]) -> bool:
    operand = reader.op_type in LINEAR_OPS and not reader.domain and tensor in reader.inputs[:2]
    return operand and formats.get(reader.id) in ACTIVATION_FORMATS
