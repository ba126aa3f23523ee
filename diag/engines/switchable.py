"""One graph whose lowered layers are switched by inputs: no rebuild and no new session for a variant.

Each switchable layer becomes an If: the layer in its format (its quantizers, its rounding), or in FP32. The
graph is cut into pieces; a variant that differs from a traced run only behind a cut starts there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto, helper

from diag.engines.emulation import emulate, rename
from diag.engines.onnxruntime import Array, Session
from diag.engines.paired import Group, Pairing
from diag.engines.reference import with_outputs
from diag.engines.slices import chunk_reads, piece_proto
from diag.model.graph import Layer, Model, TensorInfo

MOST_PIECES = 48
"""Cuts cost a session each and a copy of what crosses them; more would save little."""


@dataclass(frozen=True)
class Trace:
    """One batch under one assignment: its outputs, and what crossed each cut."""

    low: frozenset[str]
    outputs: Mapping[str, Array]
    held: Sequence[Mapping[str, Array]] = field(repr=False)
    """By piece: every tensor that it and the pieces behind it read."""
    size: int
    """Elements of the batch."""

    def bytes_beside(self, base: Trace | None) -> int:
        """Memory of the arrays that `base` does not hold too."""
        known = set(base.arrays()) if base else set()
        return sum(array.nbytes for key, array in self.arrays().items() if key not in known)

    def arrays(self) -> dict[int, Array]:
        """Every array once, by its identity."""
        return {id(array): array for part in (self.outputs, *self.held) for array in part.values()}


@dataclass
class _Piece:
    session: Session
    made: list[str]
    layers: frozenset[str]
    needed_later: frozenset[str] = frozenset()
    seconds: float = 0.0
    runs: int = 0


class Switchable:
    """A model whose layers in `switches` are lowered or not, run by run."""

    def __init__(
        self,
        model: Model,
        typed: Model,
        types: Mapping[str, TensorInfo],
        switches: Collection[str],
        always_low: Collection[str] = (),
    ) -> None:
        """`typed` has every layer of `switches` and `always_low` lowered; all others compute in FP32 here.

        Raises EngineError when ONNX Runtime cannot run the graph.
        """
        self.switches = frozenset(switches)
        self.always_low = frozenset(always_low)
        self.output_names = tuple(n for n in model.outputs if types[n].is_float)
        builder = _Builder(model, emulate(typed), types)
        groups = builder.groups(self.switches, self.always_low)
        self._pieces = _pieces(builder, groups, self.switches, self.output_names)
        self._place = {layer: i for i, piece in enumerate(self._pieces) for layer in piece.layers}
        self.forward_equivalents = 0.0
        """Work done so far, in whole forward passes of a batch as large as the first."""
        self._size = 0
        self._plain: Session | None = None
        if always_low:  # with every switch off this graph is not the reference
            self._plain = Session(with_outputs(model.proto, list(self.output_names)), model.weights)

    def reference(self, feed: Mapping[str, Array]) -> Mapping[str, Array]:
        """Outputs of one batch in FP32 throughout, whatever is always lowered here."""
        if self._plain is None:
            return self.trace(feed, ()).outputs
        self.count(feed)
        return self._plain.run(feed)

    def trace(self, feed: Mapping[str, Array], low: Collection[str]) -> Trace:
        """Run one batch with the layers of `low` lowered, keeping what variants of it can start from."""
        return self._run([dict(feed)], frozenset(low), {}, _size(feed))

    def follow(self, base: Trace, low: Collection[str]) -> Trace:
        """Run the batch of `base` under another assignment, from the first piece where they differ."""
        wanted = frozenset(low)
        first = self.difference(base, wanted)
        if first == len(self._pieces):
            return base
        return self._run(list(base.held[: first + 1]), wanted, base.outputs, base.size)

    def difference(self, base: Trace, low: frozenset[str]) -> int:
        """The first piece where an assignment differs from that of `base`; their number where none does."""
        changed = (low ^ base.low) & self._place.keys()
        return min((self._place[layer] for layer in changed), default=len(self._pieces))

    def count(self, feed: Mapping[str, Array]) -> None:
        """Count a pass that was run elsewhere."""
        self._count(_size(feed))

    def _count(self, size: int, share: float = 1.0) -> None:
        self._size = self._size or size
        self.forward_equivalents += share * size / max(self._size, 1)

    def _run(
        self, held: list[Mapping[str, Array]], low: frozenset[str], known: Mapping[str, Array], size: int
    ) -> Trace:
        """`held` ends with what the first piece to run reads."""
        outputs, first = dict(known), len(held) - 1
        for piece in self._pieces[first:]:
            switches = {_switch(layer): np.array(layer in low) for layer in piece.layers}
            began = time.perf_counter()
            made = piece.session.run({**held[-1], **switches}, piece.made)
            piece.seconds += time.perf_counter() - began
            piece.runs += 1
            outputs.update({name: made[name] for name in self.output_names if name in made})
            held.append({n: v for n, v in {**held[-1], **made}.items() if n in piece.needed_later})
        self._count(size, self._share(first))
        return Trace(low, outputs, held[:-1], size)

    def _share(self, first: int) -> float:
        """Share of a whole pass that the pieces from `first` on take, by measured time."""
        means = [piece.seconds / max(piece.runs, 1) for piece in self._pieces]
        return sum(means[first:]) / max(sum(means), 1e-12)


def _size(feed: Mapping[str, Array]) -> int:
    return sum(array.size for array in feed.values())


def _switch(layer: str) -> str:
    return f"low/{layer}"


class _Builder(Pairing):
    """Emits, for each switchable layer, an If around its FP32 nodes and its lowered ones."""

    def groups(self, switches: Collection[str], always_low: Collection[str]) -> list[Group]:
        self.prepare_header()
        return [
            Group(layer.id, self._emitted(layer, nodes, switches, always_low))
            for layer, nodes in self.reference_groups()
        ]

    def _emitted(
        self, layer: Layer, high: list[NodeProto], switches: Collection[str], always_low: Collection[str]
    ) -> list[NodeProto]:
        if layer.id not in switches and layer.id not in always_low:
            return high
        if self.same_arithmetic(layer):
            return high
        self.local.clear()  # branches do not see each other: each has its own quantizers
        self.nodes = []
        low_names = self.emit_locally(layer)
        outputs = [name for name in layer.outputs if name in low_names]
        name, low, results = _branch(
            f"low/{layer.index}", self.nodes, [low_names[output] for output in outputs]
        )
        if layer.id in switches:
            return [_if(layer, _branch("high", high, outputs), (name, low, results), outputs)]
        for node in low:
            rename(node, dict(zip(results, outputs, strict=True)))
        return low


def _branch(
    name: str, nodes: Sequence[NodeProto], outputs: Sequence[str]
) -> tuple[str, list[NodeProto], list[str]]:
    """Nodes of a branch with private names: a subgraph may not define a name of the graph around it."""
    renamed = []
    names = {output: f"{output}/{name}" for node in nodes for output in node.output if output}
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{node.name}/{name}"
        for field_ in (copy.input, copy.output):
            for index, tensor in enumerate(field_):
                field_[index] = names.get(tensor, tensor)
        renamed.append(copy)
    return name, renamed, [names[output] for output in outputs]


def _if(
    layer: Layer,
    high: tuple[str, list[NodeProto], list[str]],
    low: tuple[str, list[NodeProto], list[str]],
    outputs: Sequence[str],
) -> NodeProto:
    graphs = [
        helper.make_graph(
            nodes, f"{layer.id}/{name}", [], [helper.make_empty_tensor_value_info(n) for n in results]
        )
        for name, nodes, results in (low, high)
    ]
    return helper.make_node(
        "If", [_switch(layer.id)], list(outputs), name=layer.id, then_branch=graphs[0], else_branch=graphs[1]
    )


def _pieces(
    builder: _Builder, groups: list[Group], switches: frozenset[str], outputs: Sequence[str]
) -> list[_Piece]:
    chunks = _chunks(groups, switches)
    paired = builder.paired(groups)
    given = {t.name for t in paired.header.graph.initializer}
    reads = [chunk_reads(chunk) for chunk in chunks]
    pieces = []
    for number, chunk in enumerate(chunks):
        made = {name for group in chunk for node in group.nodes for name in node.output if name}
        later = set().union(*reads[number + 1 :])
        wanted = sorted(made & (later | set(outputs)))
        if not wanted:
            continue
        layers = frozenset(group.layer for group in chunk) & switches
        layers = frozenset(n for n in layers if _switch(n) in reads[number])
        outside = sorted(reads[number] - made - given - {_switch(n) for n in layers})
        proto = piece_proto(paired, chunk, outside, wanted, reads[number] & given)
        for layer in sorted(layers):
            proto.graph.input.append(helper.make_tensor_value_info(_switch(layer), TensorProto.BOOL, []))
        weights = {n: paired.weights[n] for n in reads[number] & given if n in paired.weights}
        pieces.append(_Piece(Session(proto, weights), wanted, layers, frozenset(later)))
    return pieces


def _chunks(groups: list[Group], switches: frozenset[str]) -> list[list[Group]]:
    """Cut before switchable layers, so that each piece begins with one, in at most MOST_PIECES pieces."""
    every = max(1, -(-len(switches) // MOST_PIECES))
    chunks: list[list[Group]] = [[]]
    seen = 0
    for group in groups:
        if group.layer in switches:
            if seen % every == 0 and chunks[-1]:
                chunks.append([])
            seen += 1
        chunks[-1].append(group)
    return chunks
