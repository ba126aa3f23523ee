"""Measures variants of a model (sets of lowered layers) on batches of data, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from diag.compare.record import Array, Record
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.engines.switchable import Switchable
from diag.model.graph import Model
from diag.numerics.measured import TensorKind
from diag.pipeline.search.outcome import Metrics, Outcome, metrics_of
from diag.pipeline.search.traces import Traces
from diag.pipeline.search.trials import TrialStore
from diag.pipeline.search.user_metric import UserMetric, measure_own
from diag.search.target import Target

Task = tuple[frozenset[str], int]
"""Lowered layers, and the number of a batch."""

Workers = Callable[[Sequence[Task]], Iterable[Outcome]]


class Variants:
    """The outputs of a switchable model against its reference, a trial for each variant and batch."""

    def __init__(
        self,
        switchable: Switchable,
        batches: Sequence[Mapping[str, Array]],
        kinds: Mapping[str, TensorKind],
        store: TrialStore | None = None,
        metric: UserMetric | None = None,
        labels: Sequence[Mapping[str, Array]] = (),
        by_channel: bool = False,
    ) -> None:
        """`metric` is computed beside the outputs' own metrics, with the `labels` of each batch.

        `by_channel`: metrics of single channels are wanted too.
        """
        self._switchable = switchable
        self._batches = list(batches)
        self._kinds = kinds
        self._store = store
        self._metric = metric
        self._labels = labels
        self._by_channel = by_channel
        self._traces = Traces(switchable)
        self._references: dict[int, Mapping[str, Array]] = {}
        self._known: dict[tuple[frozenset[str], int], Outcome] = {}
        self.workers: Workers | None = None
        """Measures trials elsewhere; None where there is nobody else."""
        self.trials = 0
        """Variants measured by this object on one batch each (those found in the store not counted)."""

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

    def batch(self, number: int) -> Mapping[str, Array]:
        """The inputs of one batch."""
        return self._batches[number]

    def add(self, batch: Mapping[str, Array]) -> int:
        """Take in one more batch; its number."""
        self._batches.append(batch)
        return len(self._batches) - 1

    @property
    def forward_equivalents(self) -> float:
        """Work done, in whole forward passes of the first batch."""
        return self._switchable.forward_equivalents

    def ahead(self, tasks: Iterable[Task]) -> None:
        """Have trials measured that will be asked for, where there are workers to do it."""
        if self.workers is None:
            return
        new = [task for task in dict.fromkeys(tasks) if self._find(*task) is None]
        for (low, number), outcome in zip(new, self.workers(new), strict=True):
            self._keep(low, number, outcome)

    def knows(self, low: frozenset[str], batch: int) -> bool:
        """Whether this trial was made."""
        return self._find(low, batch) is not None

    def outcome(self, low: frozenset[str], batch: int) -> Outcome:
        """What the outputs come to on one batch with the layers of `low` lowered."""
        found = self._find(low, batch)
        if found is None:
            reference = self._reference(batch)
            outputs = self._traces.run(batch, self._batches[batch], low)
            found = self._measured(batch, reference, outputs)
            self._keep(low, batch, found)
        return found

    def metrics(self, low: frozenset[str], batches: Sequence[int]) -> Metrics:
        """Metrics of every float output with the layers of `low` lowered, over these batches (by number)."""
        return metrics_of((self.outcome(low, number) for number in batches), self._by_channel)

    def damage(self, target: Target, low: frozenset[str], batch: int) -> float:
        """Damage of one batch, in units of what the target allows."""
        return target.damage(self.metrics(low, (batch,)))

    def plan_metrics(self, typed: Model, batches: Sequence[int]) -> Metrics:
        """Metrics of every float output of a typed model, emulated whole, over these batches."""
        return self.total(self.plan_outcomes(typed, batches))

    def plan_outcomes(self, typed: Model, batches: Sequence[int]) -> list[Outcome]:
        """What a typed model's outputs come to on each of these batches, emulated whole."""
        emulation = emulate(typed)
        session = Session(
            with_outputs(emulation.proto, list(self._switchable.output_names)), emulation.weights
        )

        def run(number: int) -> Outcome:
            feed = self._batches[number]
            self._switchable.count(feed)
            return self._measured(number, self._reference(number), session.run(feed))

        return [run(number) for number in batches]

    def measured(self, batch: int, run: Callable[[Mapping[str, Array]], Mapping[str, Array]]) -> Outcome:
        """What the outputs of something else come to on one batch: `run` is given its inputs."""
        return self._measured(batch, self._reference(batch), run(self._batches[batch]))

    def total(self, outcomes: Iterable[Outcome]) -> Metrics:
        """Metrics over batches that were measured one by one."""
        return metrics_of(outcomes, self._by_channel)

    def reference_metrics(self, batches: Sequence[int]) -> Metrics:
        """Metrics of the reference against itself: what no plan can pass."""
        same = [(n, self._reference(n)) for n in batches]
        return metrics_of((self._measured(n, out, out) for n, out in same), self._by_channel)

    def _keep(self, low: frozenset[str], batch: int, outcome: Outcome) -> None:
        self.trials += 1
        self._known[low, batch] = outcome
        if self._store:
            self._store.keep(low, batch, outcome)

    def _find(self, low: frozenset[str], batch: int) -> Outcome | None:
        if (low, batch) not in self._known:
            found = self._store.find(low, batch) if self._store else None
            if found is None:
                return None
            self._known[low, batch] = found
        return self._known[low, batch]

    def _measured(self, number: int, reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> Outcome:
        names = self._switchable.output_names
        records = {name: Record.of(self._kinds.get(name, TensorKind())) for name in names}
        for name, record in records.items():
            record.update(number, reference[name], outputs[name])
        own = None
        if self._metric is not None:
            floats = {name: outputs[name] for name in names}
            own = measure_own(self._metric, reference, floats, self._labels[number])
        found = Outcome(records, own)
        return found if self._by_channel else found.without_channels()

    def _reference(self, number: int) -> Mapping[str, Array]:
        if number not in self._references:
            feed = self._batches[number]
            if self._switchable.always_low:  # nothing switched low is not the reference then
                self._references[number] = self._switchable.reference(feed)
            else:
                self._references[number] = self._traces.run(number, feed, frozenset())
        return self._references[number]
