"""Known engine defects, matched by version, GPU, format and structure (known_issues.yaml)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field

from diag.kernels.kernel import Kernel
from diag.model.graph import Layer, Model
from diag.resources import Rules, read_rules

INPUT = "@input"
"""Stands in a chain for a graph input."""

_ALWAYS_THROUGH = frozenset({"Cast", "Identity", "QuantizeLinear", "DequantizeLinear"})
_LONGEST_GAP = 8
"""Layers that may stand between two links of a chain."""


class Versions(Rules):
    """A range of TensorRT versions, both ends included, compared as far as they are written."""

    from_: str = Field(alias="from", pattern=r"^\d+(\.\d+)*$")
    to: str = Field(pattern=r"^\d+(\.\d+)*$")

    def holds(self, version: str) -> bool:
        """Whether `version` lies inside; False when it is no version."""
        found = _numbers(version)
        low, high = _numbers(self.from_), _numbers(self.to)
        return bool(found) and found[: len(low)] >= low and found[: len(high)] <= high


class Pattern(Rules):
    """What the model's graph, or the engine's kernels, must show; all that is given must hold."""

    chains: tuple[tuple[str, ...], ...] = ()
    through: frozenset[str] = frozenset()
    operand_read_by: str = ""
    repeats: str = ""
    kernel: str = ""


class KnownIssue(Rules):
    """One reported defect."""

    id: str
    source: str = Field(pattern=r"^([\w.-]+/[\w.-]+#\d+|docs/measurements/[\w.-]+)$")
    """Who reported it: a repository's issue, or a measurement of this project's."""
    also: tuple[str, ...] = ()
    versions: tuple[Versions, ...] = Field(min_length=1)
    compute_capabilities: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    pattern: Pattern
    symptom: str
    workaround: str
    cured_by_roles: frozenset[str] = frozenset()
    """Roles of layers that cure it in higher precision, where they are others than those of the pattern."""
    fixed_in: str = ""


class KnownIssues(Rules):
    """Contents of rules/known_issues.yaml."""

    schema_: Literal["trtdiag.known_issues/1"] = Field(alias="schema")
    issues: tuple[KnownIssue, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """What is known of an engine; empty where it is not."""

    version: str
    """Of TensorRT itself: TensorRT-RTX counts its own versions, and nothing is known of it yet."""
    compute_capability: str = ""
    """`SM89` or `8.9`."""
    kernels: Sequence[Kernel] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """A known issue that fits, and the layers in which its structure was found."""

    issue: KnownIssue
    layers: tuple[str, ...]


@cache
def known_issues() -> tuple[KnownIssue, ...]:
    """The table that ships with this release."""
    return read_rules("known_issues.yaml", KnownIssues).issues


def match_known_issues(
    build: Build, model: Model | None, issues: Iterable[KnownIssue] | None = None
) -> list[Match]:
    """Issues that fit a build. A structure that cannot be looked for (no model) does not fit."""
    found = []
    for issue in known_issues() if issues is None else issues:
        if not _fits_build(issue, build):
            continue
        layers = _structure(issue.pattern, build.kernels, model)
        if layers is not None:
            found.append(Match(issue, layers))
    return found


def _fits_build(issue: KnownIssue, build: Build) -> bool:
    if not any(versions.holds(build.version) for versions in issue.versions):
        return False
    if (
        issue.compute_capabilities
        and capability_name(build.compute_capability) not in issue.compute_capabilities
    ):
        return False
    held = {dtype for kernel in build.kernels for dtype in kernel.dtypes}
    return not issue.formats or not issue.formats.isdisjoint(held)


def capability_name(text: str) -> str:
    """`SM89` for `8.9`, `SM120` for `12.0`; names stay as they are."""
    return f"SM{text.replace('.', '')}" if re.match(r"^\d+\.\d$", text) else text


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _structure(pattern: Pattern, kernels: Sequence[Kernel], model: Model | None) -> tuple[str, ...] | None:
    """Layers in which the pattern was found; None when it was not."""
    layers: list[str] = []
    if pattern.kernel:
        wanted = re.compile(pattern.kernel)
        hits = [k for k in kernels if wanted.search(f"{k.name} {k.tactic}")]
        if not hits:
            return None
        layers += hits[0].nodes
    if not (pattern.chains or pattern.repeats):
        return tuple(layers)
    graph = None if model is None else _graph_structure(pattern, model)
    return None if graph is None else tuple(dict.fromkeys((*graph, *layers)))


def _graph_structure(pattern: Pattern, model: Model) -> list[str] | None:
    layers: list[str] = []
    search = _Chains(pattern, model)
    for number, chain in enumerate(pattern.chains):
        found = search.find(chain, joins=number == 0)
        if found is None:
            return None
        layers += [layer.id for layer in found]
    if pattern.repeats:
        repeated = [layer for layer in model.layers if layer.op_type == pattern.repeats]
        if len({_signature(layer, model) for layer in repeated}) < 2:
            return None
        layers += [layer.id for layer in repeated]
    return layers


def _signature(layer: Layer, model: Model) -> str:
    """Attributes and constant inputs, as text that can be compared."""
    constants = [c.tolist() for name in layer.inputs if (c := model.constant(name)) is not None]
    return repr((sorted(layer.attributes.items()), constants))


class _Chains:
    """Looks for layers that read one another, as a chain asks; what failed once is not tried again."""

    def __init__(self, pattern: Pattern, model: Model) -> None:
        self._pattern = pattern
        self._model = model
        self._through = pattern.through | _ALWAYS_THROUGH
        self._dead: set[tuple[str, str, int, int]] = set()

    def find(self, chain: Sequence[str], *, joins: bool) -> tuple[Layer, ...] | None:
        """The first run that follows the chain; with `joins`, `operand_read_by` must hold at its end."""
        self._dead.clear()
        shared = self._pattern.operand_read_by if joins else ""
        if chain[0] == INPUT:
            return self._after(tuple(self._model.inputs), chain[1:], shared, 0)
        for layer in self._model.layers:
            if layer.op_type in chain[0].split("|"):
                if len(chain) == 1:
                    return (layer,)
                tail = self._after(layer.outputs, chain[1:], shared, 0)
                if tail is not None:
                    return (layer, *tail)
        return None

    def _after(
        self, tensors: Sequence[str], rest: Sequence[str], shared: str, gap: int
    ) -> tuple[Layer, ...] | None:
        for name in tensors:
            for reader in self._model.consumers.get(name, ()):
                found = self._at(reader, name, rest, shared, gap)
                if found is not None:
                    return found
        return None

    def _at(
        self, layer: Layer, via: str, rest: Sequence[str], shared: str, gap: int
    ) -> tuple[Layer, ...] | None:
        """The run's end when `layer`, reached by tensor `via`, is its next link or may stand before it."""
        state = (layer.id, via, len(rest), gap)
        if state in self._dead:
            return None
        if layer.op_type in rest[0].split("|"):
            if len(rest) == 1:
                if not shared or self._shares(layer, via, shared):
                    return (layer,)
            elif (tail := self._after(layer.outputs, rest[1:], shared, 0)) is not None:
                return (layer, *tail)
        if layer.op_type in self._through and gap < _LONGEST_GAP:
            tail = self._after(layer.outputs, rest, shared, gap + 1)
            if tail is not None:
                return tail
        self._dead.add(state)
        return None

    def _shares(self, layer: Layer, via: str, operator: str) -> bool:
        """Whether another operand of `layer` is read by such an operator too."""
        others = (name for name in layer.reads if name != via)
        readers = (reader for name in others for reader in self._model.consumers.get(name, ()))
        return any(reader.op_type == operator for reader in readers)
