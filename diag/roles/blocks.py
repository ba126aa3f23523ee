"""Numbers the repeated blocks of a network along its residual connections."""

from __future__ import annotations

from collections.abc import Sequence

from diag.roles.attention import Attention
from diag.roles.residual import Unit, between
from diag.roles.view import View

_LONGEST_CLOSING = 16  # layers between two units; a spelled-out norm has nine


def number_blocks(
    view: View, units: Sequence[Unit], attentions: Sequence[Attention], norms: Sequence[frozenset[str]]
) -> dict[str, int]:
    """Block number by layer id; layers outside every block are absent.

    Units (residual connections) repeat in a fixed order of kinds, as attention, FFN, attention, FFN:
    each repetition is a block. Where they do not repeat, each self-attention begins a block, and so does
    each unit in front of the first one.
    """
    alone = _innermost(units)
    kinds = [_kind(view, unit, attentions) for unit in alone]
    numbers = _numbers(kinds)
    blocks: dict[str, int] = {}
    for unit, number in zip(alone, numbers, strict=True):
        blocks.update(dict.fromkeys((unit.add.id, *unit.branch), number))
    for group, number in _closings(view, alone, numbers, norms):
        blocks.update({i: number for i in group if i not in blocks})
    _complete_attention(blocks, attentions, alone)
    return blocks


def _innermost(units: Sequence[Unit]) -> list[Unit]:
    """Units that hold no other unit."""
    adds = {unit.add.id for unit in units}
    return [unit for unit in units if adds.isdisjoint(unit.branch)]


def _kind(view: View, unit: Unit, attentions: Sequence[Attention]) -> str:
    """A: self-attention, X: cross-attention, F: FFN, C: convolution, O: other; several are joined."""
    kinds: set[str] = set()
    for attention in attentions:
        if not unit.branch.isdisjoint(attention.softmax):
            keys = attention.k or attention.softmax
            kinds.add("A" if not unit.branch.isdisjoint(keys) else "X")
    layers = [view.model.layer_by_id[i] for i in unit.branch]
    if any(view.role(x) == "ffn_down" for x in layers):
        kinds.add("F")
    if not kinds:
        kinds.add("C" if any(view.is_op(x, ("convolution",)) for x in layers) else "O")
    return "".join(sorted(kinds))


def _numbers(kinds: Sequence[str]) -> list[int]:
    has_attention = any("A" in kind for kind in kinds)
    for period in range(1, len(kinds) + 1):
        repeats = len(kinds) % period == 0 and all(
            kinds[i] == kinds[i % period] for i in range(period, len(kinds))
        )
        whole = not has_attention or sum("A" in kind for kind in kinds[:period]) == 1
        if repeats and whole:
            return [i // period for i in range(len(kinds))]
    return _numbers_by_attention(kinds)


def _numbers_by_attention(kinds: Sequence[str]) -> list[int]:
    numbers: list[int] = []
    current, seen = -1, False
    for kind in kinds:
        if "A" in kind or not seen:
            current += 1
        seen = seen or "A" in kind
        numbers.append(current)
    return numbers


def _closings(
    view: View, units: Sequence[Unit], numbers: Sequence[int], norms: Sequence[frozenset[str]]
) -> list[tuple[frozenset[str], int]]:
    """Layers between a unit's Add and the next unit's skip (a norm, a Relu) close the unit's block."""
    found: list[tuple[frozenset[str], int]] = []
    for unit, after, number in zip(units, units[1:], numbers, strict=False):
        layers = _closing(view, unit, after, norms)
        if layers:
            found.append((layers, number))
    if units:
        found += [(group, numbers[-1]) for group in _last_closing(view, units, numbers, found, norms)]
    return found


def _closing(view: View, unit: Unit, after: Unit, norms: Sequence[frozenset[str]]) -> frozenset[str]:
    output = unit.add.outputs[0]
    if after.skip == output:
        return frozenset()
    layers = between(view, output, [after.skip])
    if len(layers) > _LONGEST_CLOSING or any(
        view.is_op(view.model.layer_by_id[i], ("contraction",)) for i in layers
    ):
        return frozenset()
    return frozenset(layers)


def _last_closing(
    view: View,
    units: Sequence[Unit],
    numbers: Sequence[int],
    found: Sequence[tuple[frozenset[str], int]],
    norms: Sequence[frozenset[str]],
) -> list[frozenset[str]]:
    """Nothing follows the last unit: it closes as the unit in its place of the block before does."""
    model = _model_unit(numbers)
    if model is None:
        return []
    sample = _closing(view, units[model], units[model + 1], norms)
    readers = view.readers(units[-1].add.outputs[0])
    if not sample:
        return []
    closed_by_norm = any(not group.isdisjoint(sample) for group in norms)
    if closed_by_norm:
        return [group for group in norms if any(x.id in group for x in readers)][:1]
    ops = {view.model.layer_by_id[i].op_type for i in sample}
    return [frozenset({x.id}) for x in readers if x.op_type in ops][:1]


def _model_unit(numbers: Sequence[int]) -> int | None:
    """Index of the unit that stands where the last one stands, one block earlier; else of the one before."""
    earlier = [i for i, number in enumerate(numbers) if number == numbers[-1] - 1]
    if earlier:
        return earlier[-1]
    return len(numbers) - 2 if len(numbers) > 1 else None


def _complete_attention(
    blocks: dict[str, int], attentions: Sequence[Attention], units: Sequence[Unit]
) -> None:
    """Projections of another stream (cross-attention) belong to their attention's block."""
    for order, attention in enumerate(attentions):
        number = blocks.get(attention.softmax[0]) if units else order
        if number is not None:
            for name in attention.parts:
                blocks.setdefault(name, number)
