"""Element types of every tensor, those behind foreign operators included."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from diag.model.graph import Model, TensorInfo


def complete(types: Mapping[str, TensorInfo], model: Model) -> dict[str, TensorInfo]:
    """`types` (of ONNX inference) with the tensors that inference cannot reach: float in means float out.

    Behind an operator of another domain inference stops, until the model itself names a type again.
    """
    known = dict(types)
    for layer in model.layers:
        read = (known[name].elem_type for name in layer.reads if name in known)
        if TensorProto.FLOAT in read:
            for name in layer.outputs:
                if name:
                    known.setdefault(name, TensorInfo(TensorProto.FLOAT, None))
    return known
