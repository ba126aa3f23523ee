"""Runs a paired graph slice by slice, so that the observed tensors of one slice fit the memory together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from diag.engines.onnxruntime import Array, Session
from diag.engines.paired import Group, Paired, Watch
from diag.model.graph import TensorInfo, captured_names

DEFAULT_SLICE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Observation:
    """The arrays of one watched tensor in one batch; None where identical to the reference."""

    watch: Watch
    reference: Array
    emulated: Array | None
    local: Array | None


@dataclass
class _Slice:
    session: Session
    watches: list[Watch]
    carried: list[str]
    """Tensors that later slices need."""


class SlicedRun:
    """Sessions for the slices of a paired graph."""

    def __init__(
        self,
        paired: Paired,
        shapes: Mapping[str, TensorInfo],
        slice_bytes: int = DEFAULT_SLICE_BYTES,
    ) -> None:
        """`shapes` are those of one batch, as far as they are known."""
        self._slices = _cut(paired, shapes, slice_bytes)

    @property
    def count(self) -> int:
        return len(self._slices)

    def run(self, feed: Mapping[str, Array]) -> Iterator[list[Observation]]:
        """Observations of one batch, slice by slice in graph order. Drop them before the next slice."""
        held: dict[str, Array] = dict(feed)
        for number, part in enumerate(self._slices):
            wanted = dict.fromkeys((*part.carried, *(n for w in part.watches for n in _names(w))))
            values = part.session.run(held, list(wanted))
            values_or_held = {**held, **values}
            yield [_observation(watch, values_or_held) for watch in part.watches]
            held = self._still_needed(number, values_or_held)

    def _still_needed(self, number: int, values: Mapping[str, Array]) -> dict[str, Array]:
        later = {name for part in self._slices[number + 1 :] for name in part.session.inputs}
        return {name: value for name, value in values.items() if name in later}


def _observation(watch: Watch, values: Mapping[str, Array]) -> Observation:
    emulated = values[watch.emulated] if watch.emulated else None
    if emulated is None and watch.is_output:
        emulated = values[watch.tensor]
    return Observation(watch, values[watch.tensor], emulated, values[watch.local] if watch.local else None)


def _names(watch: Watch) -> tuple[str, ...]:
    return tuple(name for name in (watch.tensor, watch.emulated, watch.local) if name)


def _cut(paired: Paired, shapes: Mapping[str, TensorInfo], slice_bytes: int) -> list[_Slice]:
    by_layer: dict[str, list[Watch]] = {}
    for watch in paired.watches:
        if watch.source == watch.tensor and (watch.emulated or watch.local or watch.is_output):
            by_layer.setdefault(watch.layer, []).append(watch)
    chunks: list[tuple[list[Group], list[Watch]]] = [([], [])]
    filled = 0
    for group in paired.groups:
        watches = by_layer.get(group.layer, [])
        size = sum(_nbytes(shapes.get(w.tensor)) * len(_names(w)) for w in watches)
        if filled and filled + size > slice_bytes:
            chunks.append(([], []))
            filled = 0
        chunks[-1][0].extend([group])
        chunks[-1][1].extend(watches)
        filled += size
    return _sessions(paired, [c for c in chunks if c[0]])


def _nbytes(info: TensorInfo | None) -> int:
    if info is None or info.shape is None or any(not isinstance(d, int) for d in info.shape):
        return 1 << 20  # unknown: count it as a middling tensor
    return int(np.prod([d for d in info.shape if isinstance(d, int)], dtype=np.int64)) * 4


def _sessions(paired: Paired, chunks: list[tuple[list[Group], list[Watch]]]) -> list[_Slice]:
    given = {t.name for t in paired.header.graph.initializer}
    reads = [chunk_reads(groups) for groups, _ in chunks]
    slices = []
    for number, (groups, watches) in enumerate(chunks):
        made = {name for group in groups for node in group.nodes for name in node.output if name}
        later = set().union(*reads[number + 1 :]) if number + 1 < len(chunks) else set()
        carried = sorted(made & later)
        outside = sorted(reads[number] - made - given)
        used = reads[number] & given
        wanted = list(dict.fromkeys((*carried, *(n for w in watches for n in _names(w) if n in made))))
        if not wanted:
            continue
        proto = piece_proto(paired, groups, outside, wanted, used)
        weights = {name: paired.weights[name] for name in used if name in paired.weights}
        slices.append(_Slice(Session(proto, weights), watches, carried))
    return slices


def chunk_reads(groups: list[Group]) -> set[str]:
    """Every tensor that the groups' nodes read, their own among them."""
    return {
        name
        for group in groups
        for node in group.nodes
        for name in (*node.input, *captured_names(node))
        if name
    }


def piece_proto(
    paired: Paired, groups: list[Group], outside: list[str], wanted: list[str], used: set[str]
) -> ModelProto:
    proto = ModelProto()
    proto.ir_version = paired.header.ir_version
    proto.opset_import.extend(paired.header.opset_import)
    graph = proto.graph
    graph.name = paired.header.graph.name or "paired"
    declared = {v.name: v for v in paired.header.graph.input}
    for name in outside:
        if name in declared:
            graph.input.append(declared[name])
        else:
            graph.input.append(_crossing(name, paired.types.get(name)))
    for name in wanted:
        graph.output.append(helper.make_empty_tensor_value_info(name))
    graph.initializer.extend(t for t in paired.header.graph.initializer if t.name in used)
    for group in groups:
        graph.node.extend(group.nodes)
    return proto


def _crossing(name: str, info: TensorInfo | None) -> ValueInfoProto:
    """Declaration of a tensor that crosses a cut: rank and fixed sizes as far as known, no symbols."""
    if info is None:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    shape = None if info.shape is None else [d if isinstance(d, int) else None for d in info.shape]
    return helper.make_tensor_value_info(name, info.elem_type, shape)
