"""One judge for the models of all tools: their first output beside the reference's, on the same batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from diag.compare.record import Array, Record
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.model.load import load_model
from diag.numerics.measured import Kind, TensorKind
from diag.pipeline.prepare import Planned, choose_plan, plan_on

FP16_MAX = 65504.0


class Judge:
    """The first output of a model in FP32 on a folder of .npz batches, and what other models make of it."""

    def __init__(self, model: Path, batches: Path, kind: Kind) -> None:
        self._kind = TensorKind(kind)
        self._feeds = [dict(np.load(file)) for file in sorted(batches.glob("*.npz"))]
        self.references = self.run(model)

    def run(self, model: Path) -> list[Array]:
        """The first output for each batch, by ONNX Runtime on the CPU without optimisation."""
        loaded = load_model(str(model))
        return self._run(Session(loaded.proto, loaded.weights))

    def emulated(self, typed: Path) -> list[Array]:
        """The same of a model with FP16 in it: each node in FP32, its output rounded to its type.

        ONNX Runtime's own FP16 on a CPU computes chains of nodes in FP32, which hides overflow.
        """
        emulation = emulate(load_model(str(typed)))
        return self._run(Session(emulation.proto, emulation.weights))

    def metrics(self, outputs: list[Array]) -> dict[str, float]:
        """Error against the reference over all batches, by the names of `diag.numerics.table`."""
        record = Record.of(self._kind)
        for number, (reference, output) in enumerate(zip(self.references, outputs, strict=True)):
            record.update(number, reference, output)
        return record.metrics()

    def overflowing(self, planned: Planned) -> set[str]:
        """Norms (their Pow) whose squares pass FP16's largest number on some batch."""
        squares = {
            layer.outputs[0]: layer.id for layer in planned.model.layers if is_square(planned, layer.id)
        }
        session = Session(with_outputs(planned.model.proto, list(squares)), planned.model.weights)
        found: set[str] = set()
        for feed in self._feeds:
            found |= {squares[name] for name, array in session.run(feed).items() if array.max() > FP16_MAX}
        return found

    def _run(self, session: Session) -> list[Array]:
        return [session.run(feed)[session.outputs[0]] for feed in self._feeds]


def is_square(planned: Planned, layer: str) -> bool:
    """Whether this layer squares what a norm normalises."""
    return planned.roles[layer].name == "norm" and planned.model.layer_by_id[layer].op_type == "Pow"


def kept_high(planned: Planned, typed: Path) -> list[str]:
    """Layers that a plan lowers to FP16 and that are FP32 in `typed`, where nodes have kept their names.

    Casts are left out: they are no arithmetic, and AutoCast takes the model's own away.
    """
    proto = onnx.load(typed, load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    types = {v.name: v.type.tensor_type.elem_type for v in [*inferred.value_info, *inferred.output]}
    high = {
        n.name
        for n in proto.graph.node
        if n.op_type != "Cast" and types.get(n.output[0]) == onnx.TensorProto.FLOAT
    }
    return [layer for layer, fmt in planned.resolved.formats.items() if fmt == "fp16" and layer in high]


def in_fp16(model: Path) -> Planned:
    """The model with everything in FP16."""
    return plan_on(str(model), choose_plan(None, "fp16"))
