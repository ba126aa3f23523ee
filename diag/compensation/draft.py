"""A model under compensation with everything that its typed model is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from diag.calibration.measurement import table_of
from diag.calibration.records import channels_of
from diag.calibration.run import RunOptions, measure
from diag.calibration.samples import CalibrationFeeds
from diag.calibration.table import TensorRange
from diag.model import shapes
from diag.model.graph import Model, TensorInfo
from diag.numerics.formats import FORMATS, symmetric_scale
from diag.progress import Silent
from diag.typed.apply import TypedModel, apply_formats, operands_of
from diag.typed.operands import Operand
from diag.typed.passes.lower_floats import OutOfRange
from diag.typed.types import complete

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Draft:
    """A model that computes what the original does in FP32, and how it is to be quantized."""

    model: Model
    ranges: Mapping[str, TensorRange]
    method: str
    """Whose ranges are used where none was searched."""
    searched: Mapping[str, float] = field(default_factory=dict)
    weight_ratios: Mapping[str, Float] = field(default_factory=dict)
    corrections: Mapping[str, Float] = field(default_factory=dict)

    def limit(self, tensor: str) -> float:
        """The range of an activation: values beyond it are clipped."""
        found = self.searched.get(tensor)
        if found is None:
            found = self.ranges[tensor].range_of(self.method)
        assert found is not None
        return found

    def channel_absmax(self, tensor: str, rows: Float) -> Float:
        """Largest magnitude in each channel (last axis) where the table has it, else of `rows`."""
        found = channels_of(self.ranges[tensor].channel_absmax)
        return np.abs(rows).max(axis=0) if found is None or len(found) != rows.shape[1] else found


@dataclass(frozen=True)
class Lowering:
    """The plan, as far as compensation needs it: which layer computes in which format."""

    formats: Mapping[str, str]
    base: str
    format: str
    """The quantized format that is compensated."""
    out_of_range: OutOfRange = "clamp"
    fused: bool = False
    """Whether quantizers are placed where engines fuse them."""

    def types(self, model: Model) -> Mapping[str, TensorInfo]:
        """Element types and shapes of a model's tensors."""
        return complete(shapes.infer(model), model)

    def operands(self, model: Model) -> tuple[Operand, ...]:
        """Operands of the layers in the compensated format."""
        formats = {layer: fmt for layer, fmt in self.formats.items() if fmt == self.format}
        return operands_of(model, formats, self.types(model), self.fused)

    def typed(self, draft: Draft) -> TypedModel:
        """The draft in the plan's formats."""
        fmt = FORMATS[self.format]
        steps = {name: float(symmetric_scale(np.array(draft.limit(name)), fmt)) for name in draft.ranges}
        return apply_formats(
            draft.model,
            {layer.id: self.formats.get(layer.id, self.base) for layer in draft.model.layers},
            base=self.base,
            scales={self.format: steps},
            out_of_range=self.out_of_range,
            weight_ratios=draft.weight_ratios,
            corrections=draft.corrections,
            fused=self.fused,
        )


def activations(operands: Sequence[Operand]) -> tuple[str, ...]:
    """Tensors among operands that need a range, in graph order."""
    return tuple(dict.fromkeys(o.tensor for o in operands if o.weight is None))


def measured_again(
    draft: Draft, model: Model, tensors: Sequence[str], touched: frozenset[str], feeds: CalibrationFeeds
) -> Draft:
    """The draft of an edited model; ranges of what the edit touched, or made, are measured on `feeds`."""
    wanted = tuple(name for name in tensors if name in touched or name not in draft.ranges)
    found = measure(model, wanted, feeds, RunOptions(), Silent())
    fresh = table_of(found, "", draft.method).tensors
    kept = {name: fresh.get(name) or draft.ranges[name] for name in tensors}
    return replace(draft, model=model, ranges=kept)
