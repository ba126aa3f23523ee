"""From a pin's target to the layers it means."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diag.errors import PlanError
from diag.model.graph import Layer, Model
from diag.plan.schema import Pin
from diag.plan.sentences import did_you_mean, near_names


@dataclass(frozen=True)
class Targets:
    """What pins can point at: the model's layers with their roles and block numbers."""

    model: Model
    roles: Mapping[str, str]
    blocks: Mapping[str, int | None]

    def match(self, pin: Pin) -> tuple[str, ...]:
        """Ids of the layers that all of the pin's target keys match, in graph order; may be empty."""
        layers: Iterable[Layer] = self.model.layers
        if pin.exact_name is not None:
            named = self.model.layer_by_id.get(pin.exact_name)
            layers = () if named is None else (named,)
        elif pin.match is not None:
            hit = _pattern(pin.match)
            layers = (layer for layer in layers if hit(layer.id))
        return tuple(layer.id for layer in layers if self._fits(pin, layer))

    def _fits(self, pin: Pin, layer: Layer) -> bool:
        if pin.op_type is not None and layer.op_type != pin.op_type:
            return False
        if pin.role is not None and self.roles.get(layer.id) != pin.role:
            return False
        return pin.blocks is None or self.blocks.get(layer.id) in pin.blocks

    def unmatched(self, pin: Pin, index: int) -> PlanError:
        """The error for a pin that matches nothing: which of its keys is to blame, and what is near."""
        problem = f"pin {index + 1} ({pin}) matches no layer"
        for key, value in pin.target:
            if not self.match(Pin.model_validate({key: value, "format": pin.format})):
                return PlanError(problem, self._near(key, value))
        return PlanError(problem, "Each of its keys matches layers, but no layer matches all of them.")

    def _near(self, key: str, value: str | int) -> str:
        name = str(value)
        if key == "match":
            return self._near_name(name)
        if key == "block":
            numbers = sorted({block for block in self.blocks.values() if block is not None})
            if not numbers:
                return "No blocks were found in this model."
            return f"Blocks found in this model: {numbers[0]} to {numbers[-1]}."
        if key == "role":
            roles = sorted(set(self.roles.values()))
            return did_you_mean(name, roles, "Roles in this model") or "No roles were found in this model."
        return did_you_mean(
            name, sorted({layer.op_type for layer in self.model.layers}), "Operators in this model"
        )

    def _near_name(self, name: str) -> str:
        ids = [layer.id for layer in self.model.layers if layer.op_type != "Constant"]
        if name.startswith(("re:", "glob:")):
            return f"Names in this model are like {', '.join(map(repr, _like_pattern(name, ids)))}."
        writer = self.model.producers.get(name)
        if writer is not None:
            return f"It is a tensor; the node that writes it is {writer.id!r}."
        return did_you_mean(name, ids, "Layers") or f"Names in this model are like {ids[0]!r}."


def _like_pattern(pattern: str, ids: Sequence[str]) -> Sequence[str]:
    """Names that hold the pattern's longest word, or the word most like it; the first names otherwise."""
    word = max(re.findall(r"\w+", pattern.partition(":")[2]), key=len, default="")
    vocabulary = dict.fromkeys(part for name in ids for part in re.findall(r"\w+", name))
    like = near_names(word, vocabulary, 1) if word else []
    return [name for name in ids if like and like[0] in name][:3] or ids[:3]


def _pattern(match: str) -> Callable[[str], object]:
    kind, _, text = match.partition(":")
    if kind == "re":
        return re.compile(text).search
    return re.compile(fnmatch.translate(text)).match
