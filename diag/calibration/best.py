"""Which method's range costs a layer's output least: measured, on a few batches, one operand at a time.

The layers that are quantized are linear in each operand, so the error of the output is the layer applied to
the error of the operand: no bias, no difference of large numbers.

Every vector of the output (a token, a pixel) counts alike, by its noise over its signal: the norms and
softmaxes that follow make no difference between large and small ones. Energy over the whole output instead
is decided by a few large tokens, and chose worse (INT8, held-out data, in the end): MiniLM 11.8 dB instead of
14.5 (min-max 12.1), a ViT 18.9 instead of 22.0 (min-max 19.9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from diag.calibration.meter import CONVOLUTIONS, Meter
from diag.calibration.ranges import finite_db
from diag.calibration.samples import CalibrationFeeds, split
from diag.calibration.table import BEST, CalibrationTable, TensorRange
from diag.engines.onnxruntime import Session
from diag.errors import TableError
from diag.model.graph import LINEAR_OPS, Model
from diag.numerics.calibrate import METHODS, int8_error
from diag.progress import Progress
from diag.typed.operands import Operand

Array = NDArray[Any]
Limits = Mapping[str, Mapping[str, float]]
_SIDES = ("a", "b")
_DEAD = 1e-12


@dataclass
class _Reader:
    """A layer of its own, without bias; its two operands are the graph's inputs."""

    session: Session
    tensors: dict[int, str]
    """Operand number to the activation there."""
    weights: dict[int, Array]
    axis: int
    vectors: int = 0
    noise: dict[int, dict[str, float]] = field(default_factory=dict)
    """Operand number, then method, to the sum over vectors of noise over signal."""
    energy: float = 0.0
    error_energy: dict[int, dict[str, float]] = field(default_factory=dict)
    """Operand number, then method, to the energy of the error; `energy` is the signal's."""

    def observe(self, values: Mapping[str, Array], limits: Limits) -> None:
        given = {i: values[name] for i, name in self.tensors.items()} | self.weights
        signal = self._energies(given)
        alive = alive_vectors(signal)
        self.vectors += int(np.count_nonzero(alive))
        self.energy += float(signal.sum())
        for operand, tensor in self.tensors.items():
            noise = self.noise.setdefault(operand, dict.fromkeys(limits[tensor], 0.0))
            energies = self.error_energy.setdefault(operand, dict.fromkeys(limits[tensor], 0.0))
            known: dict[float, tuple[float, float]] = {}  # methods often agree
            for method, limit in limits[tensor].items():
                if limit not in known:
                    error = self._energies({**given, operand: int8_error(given[operand], limit)})
                    known[limit] = float((error[alive] / signal[alive]).sum()), float(error.sum())
                noise[method] += known[limit][0]
                energies[method] += known[limit][1]

    def _energies(self, operands: Mapping[int, Array]) -> NDArray[np.float64]:
        """Sum of squares of each output vector: along the channels of a convolution, else the last axis."""
        (output,) = self.session.run({_SIDES[i]: array for i, array in operands.items()}).values()
        return np.asarray(np.square(output, dtype=np.float64).sum(axis=self.axis)).reshape(-1)


def alive_vectors(energies: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which vectors have a ratio of noise over signal of their own: those with 1e-12 of the mean energy."""
    return np.asarray(energies > _DEAD * energies.mean())


def choose_best(
    model: Model,
    operands: Sequence[Operand],
    table: CalibrationTable,
    feeds: CalibrationFeeds,
    skip_bad: bool,
    progress: Progress,
) -> CalibrationTable:
    """The table with every method's output SQNR and each tensor's best method; `method` is `best`.

    `feeds` hold the batches that the table names as sampled (at most eight). Raises TableError when a layer
    has a measured tensor and none of them.
    """
    wanted = {int(key, 16) for key in table.sampled_batches}
    limits = {
        name: {m: r.absmax for m, r in found.methods.items() if r.absmax > 0}
        for name, found in table.tensors.items()
    }
    progress.start("weighing the methods by the layers' outputs", len(wanted))

    def sampled() -> Iterator[Mapping[str, Array]]:
        for batch in feeds.again(skip_bad):
            if (key := split(batch).key) in wanted:
                yield batch
                wanted.discard(key)
                progress.advance()
            if not wanted:
                return

    costs = output_costs(model, operands, limits, sampled())
    if wanted:
        raise TableError(
            f"{len(wanted)} of the batches that the table samples are not in the data",
            "Give all data that the table was made from.",
        )
    return _with_costs(table, costs)


def output_costs(
    model: Model,
    operands: Sequence[Operand],
    limits: Limits,
    batches: Iterable[Mapping[str, Array]],
    with_energy: bool = False,
) -> dict[str, dict[str, float]]:
    """Noise over signal that each range of `limits` (by tensor, then by any name) costs the layers' outputs.

    One operand is rounded at a time, in INT8. Tensors that no linear layer reads are left out. `with_energy`:
    the geometric mean of this with the ratio of energies, which large vectors decide.
    """
    readers = _readers(model, operands)
    tensors = tuple(dict.fromkeys(name for reader in readers for name in reader.tensors.values()))
    meter = Meter(model, tensors)
    for batch in batches:
        values = meter.run(batch).values
        for reader in readers:
            reader.observe(values, limits)
    return _costs(readers, with_energy)


def _readers(model: Model, operands: Sequence[Operand]) -> list[_Reader]:
    by_layer: dict[str, list[Operand]] = {}
    for operand in operands:
        if model.layer_by_id[operand.layer].op_type in LINEAR_OPS:
            by_layer.setdefault(operand.layer, []).append(operand)
    nodes = {node.name: node for node in model.proto.graph.node}
    readers = []
    for layer, found in by_layer.items():
        weights = {o.input: np.ascontiguousarray(o.weight) for o in found if o.weight is not None}
        tensors = {o.input: o.tensor for o in found if o.weight is None}
        if tensors and len(found) == len(_SIDES):
            axis = 1 if model.layer_by_id[layer].op_type in CONVOLUTIONS else -1
            readers.append(_Reader(layer_alone(model, nodes[layer]), tensors, weights, axis))
    return readers


def layer_alone(model: Model, node: NodeProto) -> Session:
    """A linear layer of its own, without bias; its operands are the inputs `a` and `b`."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(_SIDES)
    inputs = [helper.make_tensor_value_info(side, TensorProto.FLOAT, None) for side in _SIDES]
    graph = helper.make_graph([copy], "layer", inputs, [helper.make_empty_tensor_value_info(copy.output[0])])
    proto = ModelProto(ir_version=model.proto.ir_version, graph=graph)
    proto.opset_import.extend(model.proto.opset_import)
    return Session(proto, {})


def _costs(readers: Sequence[_Reader], with_energy: bool) -> dict[str, dict[str, float]]:
    """Mean over the layers that read a tensor of noise / signal, by tensor and method."""
    shares: dict[str, dict[str, list[float]]] = {}
    for reader in readers:
        for operand, noise in reader.noise.items() if reader.vectors else ():
            of_tensor = shares.setdefault(reader.tensors[operand], {})
            for method, total in noise.items():
                cost = total / reader.vectors
                if with_energy:
                    cost = math.sqrt(cost * reader.error_energy[operand][method] / reader.energy)
                of_tensor.setdefault(method, []).append(cost)
    return {
        tensor: {method: float(np.mean(found)) for method, found in methods.items()}
        for tensor, methods in shares.items()
    }


def _with_costs(table: CalibrationTable, costs: Mapping[str, Mapping[str, float]]) -> CalibrationTable:
    tensors = {name: _weighed(found, costs.get(name, {})) for name, found in table.tensors.items()}
    return table.model_copy(update={"method": BEST, "tensors": tensors})


def _weighed(found: TensorRange, costs: Mapping[str, float]) -> TensorRange:
    """Of equal methods the widest; min-max where nothing could be measured."""
    if not costs:
        return found.model_copy(update={"best": METHODS[0]})
    methods = {
        name: method.model_copy(update={"output_sqnr_db": finite_db(costs[name])})
        if name in costs
        else method
        for name, method in found.methods.items()
    }
    best = min((name for name in METHODS if name in costs), key=lambda name: costs[name])
    return found.model_copy(update={"best": best, "methods": methods})
