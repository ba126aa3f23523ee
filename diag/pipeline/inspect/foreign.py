"""What a Q/DQ model of another tool says, as a plan, a table of scales and the float model underneath."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diag.calibration.cache_table import imported_table
from diag.calibration.table import CalibrationTable
from diag.model import shapes
from diag.model.graph import LINEAR_OPS, Layer, Model, TensorInfo
from diag.model.load import load_model
from diag.model.save import save_model
from diag.numerics.formats import FORMATS, symmetric_scale
from diag.plan.layers import FloatLayers, float_layers
from diag.plan.schema import Plan, pin_for, plan_for_format
from diag.typed.apply import operands_of, own_format
from diag.typed.brought import DEQUANTIZE, QUANTIZE, Quantizer, quantizer_of, same_steps
from diag.typed.operands import Operand
from diag.typed.raise_floats import raise_floats
from diag.typed.strip import Stripped, strip_quantizers
from diag.typed.types import complete

_SAID: frozenset[str | None] = frozenset({"int8", "fp8"})
"""Formats that a plan says as Q/DQ models do: both operands quantized."""


@dataclass(frozen=True)
class Foreign:
    """A Q/DQ model taken apart."""

    model: Model
    """As it was given."""
    stripped: Stripped
    below: Model
    """The float model."""
    formats: Mapping[str, str]
    """Quantized format of each layer that a plan can quantize as the model does."""
    plan: Plan
    ranges: Mapping[str, float]
    """Range of each quantized activation, by its name in the float model."""
    weight_ratios: Mapping[str, NDArray[np.float64]]
    """Steps of the channels of each weight over min-max, where they differ."""
    unsaid: tuple[str, ...]
    """What a plan and a table cannot say, in sentences; without any, they give the same model again."""

    def write(self, fp32: Path) -> CalibrationTable:
        """Write the float model to `fp32`; the table that belongs to the file."""
        save_model(self.stripped.proto, self.stripped.weights, fp32)
        source = f"quantizers of {Path(self.model.path).name}"
        table = imported_table(self.ranges, load_model(fp32), source, self.model.sha256)
        texts = {name: " ".join(map(repr, ratios.tolist())) for name, ratios in self.weight_ratios.items()}
        return table.model_copy(update={"imported_weights": texts})


def take_apart(model: Model, quantizers: Sequence[Quantizer]) -> Foreign:
    """Turn the quantizers of `model` into a plan and ranges. Raises ModelError when that cannot be."""
    given = complete(shapes.infer(model), model)
    base = _base(model, given)
    _, below, types = _float_model(model, given, quantizers, base, ())
    reading = _Reading(model, {q.output: q for q in quantizers})
    for layer in float_layers(below, types).ids:
        if layer in model.layer_by_id:
            reading.take(model.layer_by_id[layer])
    stripped, below, types = _float_model(model, given, quantizers, base, reading.carried())
    floats = float_layers(below, types)
    for layer in (name for name in floats.ids if name in reading.formats):
        reading.take_ranges(below.layer_by_id[layer])
    weights = [o for o in operands_of(below, reading.formats, types) if o.weight is not None]
    ratios = {o.tensor: r for o in weights if (r := reading.weight_ratio(o)) is not None}
    own = {x.id: own_format(x, given) for x in model.layers if x.op_type != DEQUANTIZE}
    plan = _plan(reading.formats, floats, own, base)
    return Foreign(model, stripped, below, reading.formats, plan, reading.ranges, ratios, reading.unsaid())


def _float_model(
    model: Model,
    types: Mapping[str, TensorInfo],
    quantizers: Sequence[Quantizer],
    base: str,
    carried: Sequence[str],
) -> tuple[Stripped, Model, dict[str, TensorInfo]]:
    """The FP32 model underneath, and the types of its tensors; `types` are those of the model as given."""
    stripped = strip_quantizers(model, quantizers, carried)
    if base != "fp32":
        raise_floats(stripped.proto, stripped.weights, types)
    below = Model(model.path, stripped.proto, stripped.weights, "")
    return stripped, below, complete(shapes.infer(below), below)


def _base(model: Model, types: Mapping[str, TensorInfo]) -> str:
    """The float format that most layers compute in."""
    dependent = (x for x in model.layers if not model.value_dependent.isdisjoint(x.outputs))
    computing = (x for x in dependent if x.op_type not in ("Cast", QUANTIZE, DEQUANTIZE))
    return Counter(own_format(x, types) for x in computing).most_common(1)[0][0]


def _plan(formats: Mapping[str, str], floats: FloatLayers, own: Mapping[str, str], base: str) -> Plan:
    """The most common format as default; everything else by name. `own` are the float formats of layers."""
    wanted = {layer: formats.get(layer) or own.get(layer, base) for layer in floats.ids}
    linear = Counter(wanted[layer] for layer in floats.ids if layer in floats.operand)
    default = linear.most_common(1)[0][0] if linear else base
    quantized = FORMATS[default].quantized
    pins = []
    for layer, fmt in wanted.items():
        given = default if layer in floats.operand or not quantized else base
        if fmt != given:
            pins.append(pin_for(layer, fmt).model_copy(update={"alone": True}))
    return plan_for_format(default).model_copy(update={"base": base, "pins": tuple(pins)})


@dataclass
class _Reading:
    """Layers, ranges and weights, as far as a plan and a table can say what the quantizers do."""

    model: Model
    by_output: Mapping[str, Quantizer]
    formats: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)
    trouble: dict[str, dict[str, None]] = field(default_factory=dict)
    """Names of layers and tensors by what a plan cannot say of them."""

    def take(self, layer: Layer) -> None:
        """The format of one layer: that of its quantizers, when each operand has one."""
        found = [quantizer_of(self.model, self.by_output, layer.inputs[i]) for i in self._operands(layer)]
        formats = {q.format if q is not None else None for q in found}
        if len(formats) == 1 and formats <= _SAID:
            self.formats[layer.id] = str(formats.pop())
        elif any(q is not None and q.kind != "stored" and not _carriable(q) for q in found):
            self._cannot(
                "layers with only some of their inputs quantized, or in types that no plan has", layer.id
            )
        elif any(q is not None and q.kind == "stored" for q in found):
            self._cannot("layers with quantized weights alone, which stay as float values", layer.id)

    def carried(self) -> tuple[str, ...]:
        """Dequantized tensors that not only quantized layers read: an Identity of their own carries them."""
        found = [
            name
            for name, quantizer in self.by_output.items()
            if _carriable(quantizer) and (name in self.model.outputs or self._is_read_plainly(quantizer))
        ]
        self.formats |= {self.by_output[name].layer: str(self.by_output[name].format) for name in found}
        return tuple(found)

    def _is_read_plainly(self, quantizer: Quantizer) -> bool:
        readers = [x for x in self.model.consumers.get(quantizer.output, ()) if x.id not in self.formats]
        again = [q for q in self.by_output.values() if q.source == quantizer.output]
        if any(not same_steps(quantizer, q) for q in again):
            return True
        return any(reader.op_type != QUANTIZE for reader in readers)

    def take_ranges(self, layer: Layer) -> None:
        """The ranges of one quantized layer of the float model."""
        given = self.model.layer_by_id[layer.id]
        fmt = self.formats[layer.id]
        if given.op_type == DEQUANTIZE:
            self._take_range(layer.inputs[0], self.by_output[given.outputs[0]], fmt)
            return
        for index in self._operands(given):
            quantizer = quantizer_of(self.model, self.by_output, given.inputs[index])
            if quantizer is not None and quantizer.kind == "activation":
                self._take_range(layer.inputs[index], quantizer, fmt)

    def _operands(self, layer: Layer) -> Iterator[int]:
        """Inputs that a quantized layer has a quantizer on."""
        if layer.op_type in LINEAR_OPS:
            yield from range(2)
            return
        for index, name in enumerate(layer.inputs):
            if name in self.model.value_dependent:
                yield index

    def _take_range(self, tensor: str, quantizer: Quantizer, fmt: str) -> None:
        scale, zero_point = quantizer.scale, quantizer.zero_point
        assert scale is not None and zero_point is not None
        if not _usable(scale):
            self._cannot(
                "activations with a scale that is not positive and finite, which the table lacks", tensor
            )
            return
        limit = float(scale.max()) * FORMATS[fmt].max
        if scale.size > 1:
            self._cannot("activations by channel, of which the table takes the widest", tensor)
        steps = _steps(quantizer)
        if steps is not None and steps != FORMATS["int8"].max:
            self._cannot("activations that are not symmetric, whose symmetric range the table takes", tensor)
            limit = float(scale.max()) * steps
        known = self.ranges.setdefault(tensor, limit)
        if known != limit:
            self._cannot("tensors read with two scales, of which the table takes the wider", tensor)
            self.ranges[tensor] = max(known, limit)

    def weight_ratio(self, operand: Operand) -> NDArray[np.float64] | None:
        """Steps of a weight's channels over min-max; None when they are min-max."""
        layer = self.model.layer_by_id[operand.layer]
        name = layer.inputs[operand.input]
        quantizer = quantizer_of(self.model, self.by_output, name)
        if quantizer is None or quantizer.scale is None or operand.weight is None:
            return None
        axis, rank = operand.channel_axis or 0, operand.weight.ndim
        along = quantizer.per_tensor or (name in self.by_output and quantizer.axis % rank == axis)
        if not quantizer.symmetric or quantizer.block_size or not along:
            self._cannot("layers whose weights are not quantized symmetrically by output channel", layer.id)
            return None
        if not _usable(quantizer.scale):
            self._cannot("layers whose weights have a scale that is not positive and finite", layer.id)
            return None
        others = tuple(i for i in range(rank) if i != axis)
        absmax = np.abs(operand.weight.astype(np.float64)).max(axis=others)
        steps = np.broadcast_to(quantizer.scale.reshape(-1).astype(np.float64), absmax.shape)
        fmt = FORMATS[self.formats[layer.id]]
        if np.array_equal(symmetric_scale(absmax, fmt)[absmax > 0], steps[absmax > 0]):
            return None
        ratio: NDArray[np.float64] = np.divide(
            steps * fmt.max, absmax, where=absmax > 0, out=np.ones_like(absmax)
        )
        return ratio

    def _cannot(self, what: str, name: str) -> None:
        self.trouble.setdefault(what, {})[name] = None

    def unsaid(self) -> tuple[str, ...]:
        """Sentences on what a plan cannot say."""
        return tuple(
            f"{what}: {len(names)}, first {next(iter(names))}" for what, names in self.trouble.items()
        )


def _carriable(quantizer: Quantizer) -> bool:
    """Whether a quantized Identity does what the quantizer does."""
    return quantizer.kind == "activation" and quantizer.format in _SAID


def _usable(scale: NDArray[np.float32]) -> bool:
    return bool((np.isfinite(scale) & (scale > 0)).all())


def _steps(quantizer: Quantizer) -> float | None:
    """Steps from zero to the farther end of an integer quantizer; 127 where it is INT8 with zero point 0."""
    limits = {"INT8": (-128, 127), "UINT8": (0, 255)}.get(quantizer.code_name)
    if limits is None or quantizer.zero_point is None:
        return None
    zero = float(quantizer.zero_point.reshape(-1)[0])
    low, high = limits[0] - zero, limits[1] - zero
    return 127.0 if (low, high) == (-128, 127) else max(-low, high)
