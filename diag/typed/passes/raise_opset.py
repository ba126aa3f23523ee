"""Pass: a newer opset, where a format needs one.

Requires: every node has a name of its own. Ensures: the standard opset is at least `target`; names and
metadata are kept; nodes that the conversion adds are called `trtdiag/opset/...`.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, version_converter

from diag.errors import ModelError
from diag.model.graph import Layer, Model
from diag.typed.surgeon import NAMESPACE, restore_metadata


def raise_opset(proto: ModelProto, target: int) -> ModelProto:
    """The model in opset `target` or its own, whichever is newer. Raises ModelError."""
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    if opset >= target:
        return proto
    try:
        converted: ModelProto = version_converter.convert_version(proto, target)
    except Exception as error:
        raise ModelError(
            f"the plan needs ONNX opset {target} and the model (opset {opset}) cannot be converted: "
            f"{str(error).strip().splitlines()[0]}",
            f"Export it with opset {target} or later.",
        ) from error
    for node in converted.graph.node:
        if not node.name:
            node.name = f"{NAMESPACE}/opset/{node.op_type}:{node.output[0]}"
    restore_metadata(proto, converted)
    return converted


def owners(proto: ModelProto, model: Model) -> Mapping[str, Layer]:
    """The layer of `model` that each node of the raised model belongs to, by node name.

    A node that the conversion added belongs to the layer whose output it makes, else to the next one.
    """
    owner: dict[str, Layer] = {}
    waiting: list[str] = []
    for node in proto.graph.node:
        made = next((model.producers[name] for name in node.output if name in model.producers), None)
        layer = model.layer_by_id.get(node.name, made)
        waiting.append(node.name)
        if layer is not None:
            owner.update(dict.fromkeys(waiting, layer))
            waiting = []
    return owner
