"""A draft on trial: its typed model's outputs against the original's, on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diag.compare.record import Record
from diag.compensation.draft import Draft, Lowering
from diag.compensation.rules import CompensationRules
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.engines.reference import Trust, with_outputs
from diag.model.graph import Model
from diag.numerics.measured import TensorKind

Array = NDArray[Any]
Metrics = Mapping[str, Mapping[str, float]]
_ENOUGH = 2
"""Batches that must be worse before a trial is broken off."""

Damage = Callable[[Metrics], float]
"""How bad outputs are, from their metrics: 0 for none, inf for lost."""


@dataclass(frozen=True)
class Outcome:
    """Damage of the outputs on all batches together and on each (fewer, where a trial was broken off)."""

    damage: float
    by_batch: tuple[float, ...]
    metrics: Metrics

    def gain_db(self, before: Outcome) -> float:
        """By how many dB damage fell from `before`; -inf when the outputs are lost now."""
        if not math.isfinite(self.damage):
            return -math.inf
        if before.damage <= 0:
            return 0.0
        return 10 * math.log10(before.damage / max(self.damage, before.damage * 1e-30))

    def share_better(self, before: Outcome) -> float:
        """Share of the batches whose damage fell."""
        better = sum(now < then for now, then in zip(self.by_batch, before.by_batch, strict=False))
        return better / max(len(self.by_batch), 1)


@dataclass(frozen=True)
class Difference:
    """How far the edited model's FP32 outputs are from the original's."""

    max_abs: float
    rel_l2: float


def noise_over_signal(metrics: Metrics) -> float:
    """Mean over the outputs of noise over signal."""
    return float(np.mean([found["rel_l2"] ** 2 for found in metrics.values()]))


class Bench:
    """Held-out batches and what the original makes of them. Only inputs and outputs are kept."""

    def __init__(
        self,
        lowering: Lowering,
        original: Model,
        batches: Sequence[Mapping[str, Array]],
        kinds: Mapping[str, TensorKind],
        trust: Trust,
        rules: CompensationRules,
        damage: Damage = noise_over_signal,
    ) -> None:
        """Raises EngineError when ONNX Runtime cannot run the model."""
        self.batches = batches
        self._lowering = lowering
        self._kinds = kinds
        self._damage = damage
        self._outputs = [name for name, info in original.outputs.items() if info.is_float]
        session = Session(with_outputs(original.proto, self._outputs), original.weights)
        self._references = [session.run(batch) for batch in batches]
        self._allowed = max(rules.fp32_rel_l2, rules.fp32_times_jitter * trust.jitter_rel_l2)

    def judge(self, draft: Draft, before: Outcome | None = None) -> Outcome:
        """Run the draft's typed model, emulated. Broken off when the first batches are all worse than before.

        What is said of the outputs then speaks of those batches.
        """
        typed = self._lowering.typed(draft)
        emulation = emulate(typed.model)
        session = Session(with_outputs(emulation.proto, self._outputs), emulation.weights)
        return self._measured(session, before)

    def difference(self, model: Model) -> Difference:
        """Run a model in FP32."""
        found = self._measured(Session(with_outputs(model.proto, self._outputs), model.weights)).metrics
        largest = max((m["max_abs"] for m in found.values()), default=0.0)
        return Difference(largest, max((m["rel_l2"] for m in found.values()), default=0.0))

    def same(self, found: Difference) -> bool:
        """Whether a difference is FP32 rounding."""
        return found.rel_l2 <= self._allowed

    def _measured(self, session: Session, before: Outcome | None = None) -> Outcome:
        whole = self._records()
        by_batch = []
        for number, (batch, reference) in enumerate(zip(self.batches, self._references, strict=True)):
            outputs, single = session.run(batch), self._records()
            for name in self._outputs:
                single[name].update(number, reference[name], outputs[name])
                whole[name].update(number, reference[name], outputs[name])
            by_batch.append(self._worth(single))
            if before is not None and _hopeless(by_batch, before):
                break
        metrics = {name: record.metrics() for name, record in whole.items()}
        damage = self._worth(whole)
        if before is not None and len(by_batch) < len(self.batches):
            damage = before.damage * sum(by_batch) / sum(before.by_batch[: len(by_batch)])
        return Outcome(damage, tuple(by_batch), metrics)

    def _records(self) -> dict[str, Record]:
        return {name: Record.of(self._kinds.get(name, TensorKind())) for name in self._outputs}

    def _worth(self, records: Mapping[str, Record]) -> float:
        found = self._damage({name: record.metrics() for name, record in records.items()})
        return found if math.isfinite(found) else math.inf


def _hopeless(by_batch: Sequence[float], before: Outcome) -> bool:
    """Whether the first batches are enough to tell that an outcome is worse."""
    if len(by_batch) < _ENOUGH or len(by_batch) == len(before.by_batch):
        return False
    pairs = zip(by_batch, before.by_batch, strict=False)
    return all(now > then > 0 for now, then in pairs)
