"""Pass: a newer opset, where a format needs one.

Requires: nothing. Ensures: the standard opset is at least `target`; names and metadata are kept.
"""

from __future__ import annotations

from onnx import ModelProto, version_converter

from diag.errors import ModelError
from diag.typed.surgeon import restore_metadata


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
    restore_metadata(proto, converted)
    return converted
