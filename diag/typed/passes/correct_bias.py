"""Pass: the mean error of quantized layers taken off their outputs (bias correction).

Requires: nothing; it comes before all others. Ensures: a corrected layer writes a tensor of another name,
and an Add called `trtdiag/bias/...` makes the output from it, so that the correction belongs to the layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from diag.model.graph import Model
from diag.typed.surgeon import NAMESPACE


def correct_bias(model: Model, corrections: Mapping[str, NDArray[np.float32]]) -> Model:
    """The model with a constant added to the first output of each layer named in `corrections`.

    A correction has one number for each channel of the output: axis 1 of a convolution, else the last axis.
    Without any, the model itself is returned.
    """
    if not corrections:
        return model
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    nodes = []
    for node in list(proto.graph.node):
        nodes.append(node)
        if node.name in corrections:
            label, output = f"{NAMESPACE}/bias/{node.name}", node.output[0]
            values = _shaped(model, node.name, corrections[node.name])
            proto.graph.initializer.append(numpy_helper.from_array(values, f"{label}/constant"))
            node.output[0] = f"{label}/uncorrected"
            nodes.append(helper.make_node("Add", [node.output[0], f"{label}/constant"], [output], name=label))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return Model(model.path, proto, model.weights, model.sha256)


def _shaped(model: Model, layer_id: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Channels along the axis where the layer's output has them."""
    layer = model.layer_by_id[layer_id]
    weight = model.initializers.get(layer.inputs[1]) if layer.op_type in ("Conv", "ConvTranspose") else None
    spatial = len(weight.dims) - 2 if weight is not None else 0
    return np.asarray(values, np.float32).reshape(-1, *[1] * spatial)
