"""What each step of compensation proposes: for each group of layers, an edit and its gain by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from diag.calibration.best import output_costs
from diag.calibration.samples import CalibrationFeeds
from diag.compensation.bias import find_corrections
from diag.compensation.draft import Draft, Lowering, activations, measured_again
from diag.compensation.edit import Rewrite
from diag.compensation.layer_error import Reference, Rounding, gain_db
from diag.compensation.rows import Batch, groups_of_sites, rows_of
from diag.compensation.rules import CompensationRules
from diag.compensation.sites import Site, find_sites
from diag.compensation.smoothing import apply_scale, search_smoothing, weights_of
from diag.compensation.splitting import apply_split, search_split
from diag.compensation.steps_of_weights import search_weight_ratios
from diag.numerics.calibrate import METHODS
from diag.typed.operands import Operand

Float = NDArray[np.float32]

_RANGE_BATCHES = 2
"""Whole batches are run for every range that is tried: two of each kind must do."""


@dataclass(frozen=True)
class Proposal:
    """One group's change."""

    group: str
    layers: Mapping[str, float]
    """SQNR in dB that each layer's own output gains on held-out rows."""
    apply: Callable[[Draft], Draft]


@dataclass(frozen=True)
class Found:
    """One tensor's or layer's change inside a group."""

    layers: Mapping[str, float]
    edit: Callable[[Rewrite], str]
    touched: frozenset[str]


@dataclass(frozen=True)
class Workplace:
    """What every step needs."""

    lowering: Lowering
    feeds: CalibrationFeeds
    search_batches: Sequence[Batch]
    held_batches: Sequence[Batch]
    roles: Mapping[str, str]
    rules: CompensationRules

    def sites(self, draft: Draft) -> tuple[Site, ...]:
        """The draft's sites."""
        tensors = activations(self.lowering.operands(draft.model))
        return find_sites(draft.model, tensors, self.lowering.types(draft.model))

    def group_of(self, layers: Iterable[str]) -> str:
        """Role of the first of some layers."""
        return self.roles.get(next(iter(layers)), "other")

    def rows(self, draft: Draft, sites: Sequence[Site]) -> Iterator[tuple[Site, Float, Float]]:
        """Each site with rows to search on and rows held out."""
        rules = self.rules
        for group in groups_of_sites(sites, 2 * rules.search_rows, rules.search_bytes):
            names = [site.tensor for site in group]
            searched = rows_of(draft.model, names, self.search_batches, rules.search_rows)
            held = rows_of(draft.model, names, self.held_batches, rules.search_rows)
            yield from ((site, searched[site.tensor], held[site.tensor]) for site in group)


def propose_smoothing(place: Workplace, draft: Draft, folds: bool) -> list[Proposal]:
    """Migration into the constants in front of each site (`folds`), or into a Mul that is inserted."""
    found = []
    for site, rows, held in place.rows(draft, [s for s in place.sites(draft) if s.folds is folds]):
        smoothing = search_smoothing(draft, site, place.lowering.format, rows, held, place.rules.alphas)
        if smoothing is not None and _worth(place, smoothing.gains_db):
            edit = partial(apply_scale, site=site, factors=smoothing.factors)
            found.append(Found(smoothing.gains_db, edit, site.touched))
    return _edits(place, found)


def propose_splits(place: Workplace, draft: Draft) -> list[Proposal]:
    """Outlier channels in two halves."""
    found = []
    for site, rows, held in place.rows(draft, place.sites(draft)):
        split = search_split(draft, site, place.lowering.format, rows, held, place.rules.most_split_share)
        if split is not None and _worth(place, split.gains_db):
            found.append(Found(split.gains_db, partial(apply_split, found=split), site.touched))
    return _edits(place, found)


def propose_corrections(place: Workplace, draft: Draft) -> list[Proposal]:
    """Mean errors taken off."""
    operands = place.lowering.operands(draft.model)
    layers = frozenset(o.layer for o in operands)
    found = corrections(place, draft, layers)
    gains = dict.fromkeys(found, 0.0) | _correction_gains(place, draft, found)
    proposals = []
    for group, members in _by_group(place, [name for name in found if gains[name] >= 0]).items():
        chosen = {name: found[name] for name in members}

        def apply(best: Draft, chosen: Mapping[str, Float] = chosen) -> Draft:
            return replace(best, corrections={**best.corrections, **chosen})

        proposals.append(Proposal(group, {name: gains[name] for name in members}, apply))
    return proposals


def corrections(place: Workplace, draft: Draft, layers: frozenset[str]) -> dict[str, Float]:
    """Bias corrections of some layers, measured on all calibration batches."""
    operands = place.lowering.operands(draft.model)
    return find_corrections(draft, operands, place.lowering.format, place.feeds, layers)


def propose_ranges(place: Workplace, draft: Draft) -> list[Proposal]:
    """Ranges of activations by the error of the outputs of the layers that read them (INT8)."""
    if place.lowering.format != "int8":
        return []
    operands = place.lowering.operands(draft.model)
    found = _better_ranges(place, draft, operands)
    readers = {o.tensor: o.layer for o in reversed(operands)}
    proposals = []
    for group, layers in _by_group(place, [readers[name] for name in found]).items():
        members = {name: limit for name, (limit, _) in found.items() if readers[name] in layers}

        def apply(best: Draft, members: Mapping[str, float] = members) -> Draft:
            return replace(best, searched={**best.searched, **members})

        proposals.append(Proposal(group, {readers[name]: found[name][1] for name in members}, apply))
    return proposals


def _better_ranges(
    place: Workplace, draft: Draft, operands: Sequence[Operand]
) -> dict[str, tuple[float, float]]:
    """Tensors whose best range on the search batches is better on held-out ones too: range, gain in dB."""
    limits = {name: _limits(draft, name, place.rules) for name in activations(operands)}
    searched, held = place.search_batches[:_RANGE_BATCHES], place.held_batches[:_RANGE_BATCHES]
    costs = output_costs(draft.model, operands, limits, searched, with_energy=True)
    chosen = {name: min(found, key=lambda label: found[label]) for name, found in costs.items()}
    pairs = {
        name: {label: found[label] for label in ("now", chosen.get(name, "now"))}
        for name, found in limits.items()
    }
    judged = output_costs(draft.model, operands, pairs, held, with_energy=True)
    gains = {name: gain_db(judged[name]["now"], judged[name][label]) for name, label in chosen.items()}
    least = place.rules.least_layer_gain_db
    return {name: (limits[name][chosen[name]], gain) for name, gain in gains.items() if gain >= least}


def _limits(draft: Draft, tensor: str, rules: CompensationRules) -> dict[str, float]:
    """The range in use, shares of the largest magnitude, and what every method of calibration gives."""
    absmax = draft.ranges[tensor].absmax
    found = {"now": draft.limit(tensor), "minmax": absmax}
    found |= {f"{ratio:g}": ratio * absmax for ratio in rules.range_ratios}
    measured = draft.ranges[tensor].methods
    found |= {name: measured[name].absmax for name in METHODS if name in measured}
    return {name: limit for name, limit in found.items() if limit > 0} or {"now": 1.0}


def propose_weight_steps(place: Workplace, draft: Draft) -> list[Proposal]:
    """Steps of weights by the error of their layer's output."""
    names: dict[str, str] = {}
    found: dict[str, tuple[Float, float]] = {}
    for site, rows, held in place.rows(draft, place.sites(draft)):
        chosen = search_weight_ratios(
            draft, site, place.lowering.format, rows, held, place.rules.weight_ratios
        )
        found |= {layer: pair for layer, pair in chosen.items() if _worth(place, {layer: pair[1]})}
        names |= {t.layer: draft.model.layer_by_id[t.layer].inputs[t.weight] for t in site.takers}
    proposals = []
    for group, layers in _by_group(place, list(found)).items():
        ratios = {names[layer]: found[layer][0] for layer in layers}

        def apply(best: Draft, ratios: Mapping[str, Float] = ratios) -> Draft:
            return replace(best, weight_ratios={**best.weight_ratios, **ratios})

        proposals.append(Proposal(group, {layer: found[layer][1] for layer in layers}, apply))
    return proposals


def _worth(place: Workplace, gains: Mapping[str, float]) -> bool:
    return sum(gains.values()) / len(gains) >= place.rules.least_layer_gain_db


def _by_group(place: Workplace, layers: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for layer in layers:
        groups.setdefault(place.group_of([layer]), []).append(layer)
    return groups


def _edits(place: Workplace, found: Sequence[Found]) -> list[Proposal]:
    """One proposal for each group: all its sites are edited at once."""
    groups: dict[str, list[Found]] = {}
    for item in found:
        groups.setdefault(place.group_of(item.layers), []).append(item)
    return [
        Proposal(
            group,
            {layer: gain for item in items for layer, gain in item.layers.items()},
            partial(_edited, place, items),
        )
        for group, items in groups.items()
    ]


def _edited(place: Workplace, items: Sequence[Found], draft: Draft) -> Draft:
    rewrite = Rewrite(draft.model)
    made = frozenset(item.edit(rewrite) for item in items)
    touched = made.union(*(item.touched for item in items))
    model = rewrite.finish()
    tensors = activations(place.lowering.operands(model))
    return measured_again(draft, model, tensors, touched, place.feeds)


def _correction_gains(place: Workplace, draft: Draft, found: Mapping[str, Float]) -> dict[str, float]:
    """What corrections bring to each layer's own output, on held-out rows."""
    gains = {}
    sites = [s for s in place.sites(draft) if any(taker.layer in found for taker in s.takers)]
    for site, _, held in place.rows(draft, sites):
        weights = weights_of(draft, site)
        ratios = tuple(_ratio(draft, taker.layer) for taker in site.takers)
        rounding = Rounding(place.lowering.format, draft.limit(site.tensor), ratios)
        reference, passed = Reference(held, weights), rounding.activation(held)
        for number, taker in enumerate(site.takers):
            if taker.layer in found:
                output = passed @ rounding.weight(number, weights[number])
                before = reference.noise_of(number, output)
                after = reference.noise_of(number, output + found[taker.layer])
                gains[taker.layer] = gain_db(before, after)
    return gains


def _ratio(draft: Draft, layer: str) -> Float | None:
    return draft.weight_ratios.get(draft.model.layer_by_id[layer].inputs[1])
