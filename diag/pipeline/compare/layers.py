"""From records by tensor to the report's layers, outputs and births."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diag.compare.births import Damage, LayerFacts, find_births
from diag.compare.comparison import Comparison
from diag.compare.record import Record
from diag.engines.paired import Watch
from diag.model.graph import Model
from diag.numerics.metrics import identical_metrics, sqnr_db
from diag.report.schema import Birth, LayerInfo, OutputInfo, WorstCase
from diag.roles import Role


def layer_infos(
    model: Model,
    watches: Sequence[Watch],
    comparison: Comparison,
    roles: Mapping[str, Role],
    formats: Mapping[str, str],
) -> list[LayerInfo]:
    """One entry for each layer with a float output that depends on the data, in graph order.

    A layer with several outputs is described by the worst of them.
    """
    by_layer: dict[str, list[Watch]] = {}
    for watch in watches:
        by_layer.setdefault(watch.layer, []).append(watch)
    infos = []
    for layer_id, seen in by_layer.items():
        layer = model.layer_by_id[layer_id]
        watch = min(seen, key=lambda w: _sqnr(comparison.accumulated.get(w.source)))
        accumulated = comparison.accumulated.get(watch.source)
        local = comparison.local.get(watch.tensor)
        infos.append(
            LayerInfo(
                id=layer_id,
                name=layer_id,
                op_type=layer.op_type,
                role=roles[layer_id].name,
                block=roles[layer_id].block,
                format=formats.get(layer_id, "fp32"),
                outputs=[w.tensor for w in seen],
                source=str(layer.source or ""),
                accumulated=accumulated.metrics() if accumulated else identical_metrics(),
                local=local.metrics() if local else {},
                worst=_worst(accumulated),
                status="compared",
            )
        )
    return infos


def is_bad(record: Record, threshold_db: float) -> bool:
    """Whether a tensor is bad: below the threshold, not finite, or with a whole row lost.

    The last matters where one token of many is destroyed: the SQNR of all rows together hides it.
    """
    return sqnr_db(record.sums) < threshold_db or is_destroyed(record)


def is_destroyed(record: Record) -> bool:
    """Whether values are gone altogether: not finite, or whole rows of zeros."""
    return record.sums.nonfinite > 0 or record.sums.lost_rows > 0


def _sqnr(record: Record | None) -> float:
    return sqnr_db(record.sums) if record else float("inf")


def _worst(record: Record | None) -> WorstCase | None:
    if record is None or record.worst_batch < 0:
        return None
    return WorstCase(batch=record.worst_batch, index=list(record.worst_index), channel=record.worst_channel())


def output_infos(model: Model, comparison: Comparison) -> list[OutputInfo]:
    """One entry for each float output of the graph."""
    infos = []
    for name in model.outputs:
        record = comparison.accumulated.get(name)
        if record is None:
            continue
        producer = model.producers.get(name)
        layer = producer.id if producer else ""
        infos.append(OutputInfo(name=name, layer=layer, metrics=record.metrics(), worst=_worst(record)))
    return infos


def birth_infos(
    model: Model, watches: Sequence[Watch], comparison: Comparison, threshold_db: float
) -> list[Birth]:
    """Where the error begins (see `diag.compare.births`), with the worst batch and element."""
    records = {w.tensor: comparison.accumulated.get(w.source) for w in watches}
    values = {name: _sqnr(record) for name, record in records.items()}
    damage = Damage(
        values,
        bad={name for name, record in records.items() if record and is_bad(record, threshold_db)},
        destroyed={name for name, record in records.items() if record and is_destroyed(record)},
        locally_bad={name for name, record in comparison.local.items() if is_bad(record, threshold_db)},
    )
    sources = {w.tensor: w.source for w in watches}
    facts = [LayerFacts(layer.id, layer.reads, layer.outputs) for layer in model.layers]
    births = []
    for place in find_births(facts, damage, _ends(model, values)):
        worst = _worst(comparison.accumulated.get(sources[place.output])) or WorstCase(batch=0)
        births.append(
            Birth(
                layer=place.layer,
                output=place.output,
                metric="sqnr_db",
                before=place.before_db,
                after=place.after_db,
                batch=worst.batch,
                index=worst.index,
                victims=place.victims,
                reaches_output=place.reaches_output,
            )
        )
    return births


def _ends(model: Model, compared: Collection[str]) -> set[str]:
    """Compared tensors that a graph output is, or is made from without another compared tensor between.

    An output of integers (an ArgMax, say) is not compared itself, and damage reaches it all the same.
    """
    ends: set[str] = set()
    seen: set[str] = set()
    waiting = list(model.outputs)
    while waiting:
        name = waiting.pop()
        if name in compared:
            ends.add(name)
        elif name not in seen and name in model.producers:
            waiting.extend(model.producers[name].reads)
        seen.add(name)
    return ends
