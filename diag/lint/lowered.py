"""What rules on float formats look at: the layers that get one, and what was measured of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from diag.model.graph import Layer, Model
from diag.numerics.formats import FORMATS, Format


@dataclass(frozen=True)
class Lowered:
    """A model and the 16-bit float format of each layer that gets one."""

    model: Model
    floats: Mapping[str, str]

    def format_of(self, layer: Layer) -> Format:
        return FORMATS[self.floats[layer.id]]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.model.layers if layer.id in self.floats)


@dataclass(frozen=True, slots=True)
class Extremes:
    """Smallest and largest finite element of a tensor, and how many are NaN."""

    minimum: float
    """Like the maximum, of elements that do not stand for infinity."""
    maximum: float
    lowest: float = 0.0
    """Smallest finite element, those included that stand for minus infinity in a mask."""
    nan: int = 0
    energy: float = 0.0
    """Sum of the squares of the elements that were counted."""
    elements: int = 0

    @property
    def absmax(self) -> float:
        return max(-self.minimum, self.maximum)

    @property
    def rms(self) -> float:
        return math.sqrt(self.energy / self.elements) if self.elements else 0.0
