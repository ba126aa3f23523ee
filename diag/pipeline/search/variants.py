"""Measures variants of a model (sets of lowered layers) on batches of data, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from diag.compare.record import Array, Record
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.engines.switchable import Switchable, Trace
from diag.model.graph import Model
from diag.numerics.measured import TensorKind
from diag.pipeline.search.trials import Metrics, TrialStore
from diag.pipeline.search.user_metric import MetricMean, UserMetric
from diag.search.target import Target

OWN = "(own metric)"
"""Stands in the place of an output's name for the user's own metric."""

_MOST_TRACED = 2


class Variants:
    """The outputs of a switchable model against its reference.

    Traces of the reference and of the fully lowered model are kept for two batches at a time (one to choose
    on, one held out): a variant starts from the nearer one. Of the other batches only the reference's outputs
    are kept.
    """

    def __init__(
        self,
        switchable: Switchable,
        batches: Sequence[Mapping[str, Array]],
        kinds: Mapping[str, TensorKind],
        store: TrialStore | None = None,
        metric: UserMetric | None = None,
        labels: Sequence[Mapping[str, Array]] = (),
    ) -> None:
        """`metric` is computed beside the outputs' own metrics, with the `labels` of each batch."""
        self._switchable = switchable
        self._batches = list(batches)
        self._kinds = kinds
        self._store = store
        self._metric = metric
        self._labels = labels
        self._traced: dict[int, tuple[Trace, Trace]] = {}
        self._references: dict[int, Mapping[str, Array]] = {}
        self.trials = 0
        """Variants measured by this object (those found in the store not counted)."""

    @property
    def has_own_metric(self) -> bool:
        """Whether batches need labels."""
        return self._metric is not None

    @property
    def output_names(self) -> tuple[str, ...]:
        """Float outputs of the model."""
        return self._switchable.output_names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each input in the first batch."""
        return {name: tuple(array.shape) for name, array in self._batches[0].items()}

    def add(self, batch: Mapping[str, Array]) -> int:
        """Take in one more batch; its number."""
        self._batches.append(batch)
        return len(self._batches) - 1

    def known(self, low: frozenset[str], batches: Sequence[int]) -> bool:
        """Whether this trial was made before."""
        return self._store is not None and self._store.find(low, tuple(batches)) is not None

    def keep(self, low: frozenset[str], batches: Sequence[int], metrics: Metrics) -> None:
        """Take in a trial that was made elsewhere."""
        self.trials += 1
        if self._store:
            self._store.keep(low, tuple(batches), metrics)

    @property
    def forward_equivalents(self) -> float:
        """Work done, in whole forward passes of one batch."""
        return self._switchable.forward_equivalents

    def metrics(self, low: frozenset[str], batches: Sequence[int]) -> Metrics:
        """Metrics of every float output with the layers of `low` lowered, over these batches (by number)."""
        numbers = tuple(batches)
        known = self._store.find(low, numbers) if self._store else None
        if known is not None:
            return known
        found = self._measured(numbers, lambda number: self._outputs(low, number, alone=len(numbers) == 1))
        self.trials += 1
        if self._store:
            self._store.keep(low, numbers, found)
        return found

    def plan_metrics(self, typed: Model, batches: Sequence[int]) -> Metrics:
        """Metrics of every float output of a typed model, emulated whole, over these batches."""
        emulation = emulate(typed)
        session = Session(
            with_outputs(emulation.proto, list(self._switchable.output_names)), emulation.weights
        )
        return self._measured(batches, lambda number: session.run(self._batches[number]))

    def reference_metrics(self, batches: Sequence[int]) -> Metrics:
        """Metrics of the reference against itself: what no plan can pass."""
        return self._measured(batches, self._reference)

    def _measured(self, batches: Sequence[int], run: Callable[[int], Mapping[str, Array]]) -> Metrics:
        names = self._switchable.output_names
        records = {name: Record.of(self._kinds.get(name, TensorKind())) for name in names}
        own = MetricMean(self._metric) if self._metric else None
        for number in batches:
            reference, outputs = self._reference(number), run(number)
            for name, record in records.items():
                record.update(number, reference[name], outputs[name])
            if own is not None:
                own.update(reference, {name: outputs[name] for name in names}, self._labels[number])
        found = {name: record.metrics() for name, record in records.items()}
        return found | ({OWN: own.metrics()} if own else {})

    def damage(self, target: Target, low: frozenset[str], batch: int) -> float:
        """Damage of one batch, in units of what the target allows."""
        return target.damage(self.metrics(low, (batch,)))

    def _reference(self, number: int) -> Mapping[str, Array]:
        if number not in self._references:
            self._references[number] = self._switchable.reference(self._batches[number])
        return self._references[number]

    def _outputs(self, low: frozenset[str], number: int, alone: bool) -> Mapping[str, Array]:
        """A trial on one batch starts from a trace of it; one on many would make two traces a batch."""
        if not alone:
            return self._switchable.outputs(self._batches[number], low)
        high, lowered = self._traces(number)
        nearer = high if len(low ^ high.low) <= len(low ^ lowered.low) else lowered
        return self._switchable.outputs_of(nearer, low)

    def _traces(self, number: int) -> tuple[Trace, Trace]:
        if number not in self._traced:
            while len(self._traced) >= _MOST_TRACED:  # free another batch's before making this one's
                del self._traced[next(iter(self._traced))]
            feed = self._batches[number]
            high = self._switchable.trace(feed, ())
            self._traced[number] = high, self._switchable.trace(feed, self._switchable.switches)
        self._traced[number] = found = self._traced.pop(number)  # the last one used goes last
        return found
