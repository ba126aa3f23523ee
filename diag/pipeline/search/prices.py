"""What pins cost in time: measured, where reports of timed engines are given; else an estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from diag.errors import UsageError
from diag.model.graph import Layer, Model, TensorInfo
from diag.report.io import read_report
from diag.report.schema import Report
from diag.resources import Rules, read_rules

_AGAIN = "Make one with: trtdiag inspect ENGINE --model MODEL --plan PLAN --times PROFILE --out DIR."


class PriceRules(Rules):
    """Contents of rules/prices.yaml."""

    rate: dict[str, float]
    bytes: dict[str, float]
    flop_per_byte: float


@cache
def price_rules() -> PriceRules:
    """The rules that ship with this release."""
    return read_rules("prices.yaml", PriceRules)


@dataclass(frozen=True)
class Prices:
    """Time of layers in formats, in milliseconds where `measured`, else in units without a name."""

    model: Model
    types: Mapping[str, TensorInfo]
    """With the concrete shapes of one batch."""
    base: str
    timed: Mapping[str, Mapping[str, float]]
    """Measured milliseconds, by the format of the layer (then its name)."""

    @property
    def measured(self) -> bool:
        return bool(self.timed)

    @property
    def source(self) -> str:
        """Where prices come from, in words."""
        if self.measured:
            return f"measured on engines ({', '.join(sorted(self.timed))}), other formats by their peak rates"
        return "an estimate from operations and bytes (roofline), not measured"

    def layer(self, name: str, fmt: str) -> float:
        """Time of one layer in one format. Where it was timed in another, scaled by the estimates."""
        if name in self.timed.get(fmt, {}):
            return self.timed[fmt][name]
        estimate = self._estimate(self.model.layer_by_id[name], fmt)
        for other, times in self.timed.items():
            if name in times:
                known = self._estimate(self.model.layer_by_id[name], other)
                return times[name] * (estimate / known if known > 0 else 1.0)
        return 0.0 if self.measured else estimate

    def plan(self, formats: Mapping[str, str]) -> float:
        """Time of all layers that depend on data, each in its format."""
        return sum(self.layer(layer, fmt) for layer, fmt in formats.items())

    def raising(self, layers: Sequence[str], low: Mapping[str, str], high: str) -> float:
        """Time that the layers take more in the format `high` than in their own."""
        return sum(self.layer(n, high) - self.layer(n, low[n]) for n in layers)

    def _estimate(self, layer: Layer, fmt: str) -> float:
        """Roofline in units of one TF32 operation: the larger of arithmetic and traffic."""
        rules = price_rules()
        base_bytes = rules.bytes[fmt if fmt in ("fp16", "bf16") else self.base]
        read = sum(self._elements(name) for name in layer.inputs) * rules.bytes[fmt]
        written = sum(self._elements(name) for name in layer.outputs) * base_bytes
        return max(self._operations(layer) / rules.rate[fmt], (read + written) * rules.flop_per_byte)

    def _operations(self, layer: Layer) -> float:
        made = sum(self._elements(name) for name in layer.outputs)
        if layer.op_type in ("MatMul", "Gemm") and layer.inputs:
            shape = self._shape(layer.inputs[0])
            return 2.0 * made * (shape[-1] if shape else 1)
        if layer.op_type in ("Conv", "ConvTranspose") and len(layer.inputs) > 1:
            return 2.0 * made * math.prod(self._shape(layer.inputs[1])[1:])
        return float(made)

    def _elements(self, name: str) -> int:
        return math.prod(self._shape(name)) if name else 0

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.model.weights:
            return tuple(self.model.weights[name].shape)
        info = self.types.get(name)
        return tuple(d for d in (info.shape or ()) if isinstance(d, int)) if info is not None else ()


def open_prices(paths: Sequence[str], model: Model, types: Mapping[str, TensorInfo], base: str) -> Prices:
    """Prices from reports with kernel times; without any, estimates.

    Raises ReportError for a file that is no report, UsageError for one of another model or without times.
    """
    timed: dict[str, dict[str, float]] = {}
    for path in paths:
        report = read_report(path)
        if report.model.sha256 and report.model.sha256 != model.sha256:
            raise UsageError(f"prices {path!r} are of another model", "Inspect an engine of this model.")
        if not any(kernel.time_ms is not None for kernel in report.kernels):
            raise UsageError(f"report {path!r} holds no kernel times", _AGAIN)
        for layer, (fmt, time_ms) in _times(report, model).items():
            timed.setdefault(fmt, {})[layer] = time_ms
    if paths and not timed:
        raise UsageError("no kernel of --prices names a layer of the model", _AGAIN)
    return Prices(model, types, base, timed)


def _times(report: Report, model: Model) -> dict[str, tuple[str, float]]:
    """Milliseconds of each layer, with the format that it was asked in.

    A kernel's time is split evenly among the layers in it that multiply, or among all where none does.
    """
    formats = {layer.name: layer.format for layer in report.layers}
    default = report.plan.default if report.plan else "fp32"
    found: dict[str, tuple[str, float]] = {}
    for kernel in report.kernels:
        layers = [n for n in kernel.layers if n in model.layer_by_id]
        heavy = [
            n for n in layers if model.layer_by_id[n].op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose")
        ]
        for layer in heavy or layers:
            fmt = formats.get(layer, default)
            before = found.get(layer, (fmt, 0.0))[1]
            found[layer] = fmt, before + (kernel.time_ms or 0.0) / len(heavy or layers)
    return found
