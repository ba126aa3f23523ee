"""Pass: float Constant nodes become initializers of the same name.

Requires: nothing. Ensures: every constant that a later pass converts is a graph initializer, or stays as it
is because it is a graph's output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from diag.typed.surgeon import Surgery, inner_graphs, substitute


def lift_constants(surgery: Surgery) -> None:
    """Replace Constant nodes that hold a float tensor; other constants stay nodes."""
    outputs = _output_names(surgery.graph)
    kept: list[Any] = []
    for node in surgery.graph.nodes:
        value = _float_value(node)
        if value is None or node.outputs[0].name in outputs:
            kept.append(node)
            continue
        variable = node.outputs[0]
        constant = surgery.constant(variable.name, value, "fp32")
        for consumer in list(variable.outputs):
            substitute(consumer.inputs, variable, constant)
        node.outputs.clear()
    surgery.graph.nodes.clear()  # made anew: taking out one by one is quadratic in the number of nodes
    surgery.graph.nodes.extend(kept)


def _output_names(graph: Any) -> set[str]:
    """Outputs of a graph and of every graph inside it."""
    names = {tensor.name for tensor in graph.outputs}
    return names.union(*(_output_names(inner) for node in graph.nodes for inner in inner_graphs(node)))


def _float_value(node: gs.Node) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    if node.op != "Constant":
        return None
    value = node.attrs.get("value")
    if isinstance(value, gs.Constant) and value.dtype == np.float32:
        return np.asarray(value.values)
    for key in ("value_float", "value_floats"):
        if key in node.attrs:
            return np.asarray(node.attrs[key], np.float32)
    return None
