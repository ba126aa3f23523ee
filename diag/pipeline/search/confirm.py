"""`pin --confirm`: the emulation's pins on the engine that ships; where it misses, pins found on builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed
from diag.engines.stamp import Identity, sha256_of
from diag.errors import EngineError
from diag.feeds import Feeds, open_feeds
from diag.pipeline.engine.builds import Builds, EngineBuilds, Runs
from diag.pipeline.engine.stage import Subject
from diag.pipeline.prepare import read_scales
from diag.pipeline.search.choose import can_afford
from diag.pipeline.search.on_builds import BuildTrial, OnBuilds, pins_text, values_of
from diag.pipeline.search.outcome import Metrics
from diag.pipeline.search.plans import Weighed, pinned, weigh
from diag.pipeline.search.report import Found, prove
from diag.pipeline.search.settings import TRIALS_FILE
from diag.pipeline.search.trials import TrialStore
from diag.pipeline.settings import EngineSettings
from diag.plan.schema import Plan, plan_sha256
from diag.progress import Progress
from diag.report.schema import Report
from diag.search.builds import BuildSearch, Pointed, search_builds
from diag.search.pins import PinSearch

LAST_FORMAT = "fp32"
"""Of the pins, where everything raised to their format misses on the engine."""


def builds_on(engine: str | None) -> Builds | None:
    """What builds plans for this engine; None where no engine is asked for.

    Raises EngineError at once for one that cannot work here, before hours of searching.
    """
    return None if engine is None else EngineBuilds(EngineSettings(engine=engine))


def confirm(found: Found, builds: Builds | None, progress: Progress) -> tuple[Found, Report]:
    """Write the plan found down and prove it; on an engine, with pins that hold there.

    Where engines are built and not run (TensorRT-RTX without its GPU), there are no numbers to search by.
    Raises EngineError when the first plan cannot be built or run.
    """
    if builds is None or not builds.runs:
        return found, prove(found, progress, builds.name if builds else "emulate")
    trials = _Trials(found, builds, progress)
    found = trials.conclusion()
    out, identity = Path(found.search.settings.out), trials.identity(found.chosen.plan)
    report = prove(found, progress, builds.kept(out, identity))
    builds.finish(out, identity)
    return found, report


class _Trials:
    """Builds of one search, each made once: what they gave is kept as trials are."""

    def __init__(self, found: Found, builds: Builds, progress: Progress) -> None:
        self._found = found
        self._search = search = found.search
        self._builds = builds
        self._progress = progress
        self._out = Path(search.settings.out)
        self._store = TrialStore(self._out / TRIALS_FILE, "\n".join([search.key, builds.identity]))
        self._batches = search.held_out if search.settings.holdout else tuple(range(search.batches))
        """Those of the report."""
        self._first = frozenset(found.pins.pins)
        self._good: Plan | None = None
        self._made: list[BuildTrial] = []
        self._metrics: dict[str, Metrics] = {}

    def conclusion(self) -> Found:
        """What was found, with what the builds said of it."""
        found = self._found
        result, fmt = self._in_formats()
        too_dear = result.outcome == "repaired" and not can_afford(found.search, result.pins)
        repaired = result.outcome == "repaired" and not too_dear
        plan = self._plan(frozenset(result.pins), fmt) if repaired else found.chosen.plan
        on_builds = OnBuilds(
            self._builds.name,
            result,
            fmt,
            tuple(found.pins.pins),
            tuple(self._made),
            len(found.search.candidates),
            self._metrics.get(plan_sha256(plan), {}),
            too_dear,
        )
        return _with_pins_of(found, on_builds, plan) if repaired else replace(found, builds=on_builds)

    def _in_formats(self) -> tuple[BuildSearch, str]:
        """The search with pins in the format that emulation chose; where all of them miss in it, in FP32."""
        result, fmt = self._in_format(self._found.format), self._found.format
        if result.outcome != "impossible" or not self._found.met or fmt == LAST_FORMAT:
            return result, fmt
        self._progress.note(f"everything raised to {fmt.upper()} misses on {self._builds.name}; trying FP32")
        known = {ids: False for ids in result.tried if not ids}
        last = self._in_format(LAST_FORMAT, known, result.builds - len(known))
        if last.outcome == "impossible":
            return last, fmt
        return replace(last, outcome="repaired"), LAST_FORMAT

    def _in_format(
        self, fmt: str, known: Mapping[frozenset[str], bool] | None = None, spent: int = 0
    ) -> BuildSearch:
        """Where the emulation misses already, nothing but its own plan is built."""
        found = self._found
        ranked = [effect.candidate.id for effect in found.ranking.effects]
        order = list(dict.fromkeys([*ranked, *(c.id for c in found.search.candidates)]))
        return search_builds(
            found.pins.pins,
            order if found.met else found.pins.pins,
            lambda ids: self._holds(ids, fmt),
            self._suspects if known is None else Pointed,
            known,
            spent,
        )

    def _suspects(self) -> Pointed:
        """Candidates that the engine of the emulation's plan points at."""
        first = self._found.chosen.plan
        of_layer = {layer: c.id for c in self._search.candidates for layer in c.layers}
        found = self._builds.suspects(self._subject(first), self.identity(first), of_layer)
        return Pointed(tuple(of_layer[layer] for layer in found.ids if layer in of_layer), found.builds)

    def _holds(self, ids: frozenset[str], fmt: str) -> bool:
        """Build and run; a plan that cannot be built does not hold, unless it is the first."""
        plan, pins = self._plan(ids, fmt), tuple(self._named(ids))
        try:
            metrics = self._measured(plan, pins_text(pins))
        except EngineError as error:
            if not self._made:
                raise
            metrics, values = {}, error.problem
        else:
            values = values_of(metrics, self._search.target.bounds)
        met = self._search.target.met(metrics)
        self._metrics[plan_sha256(plan)] = metrics
        self._made.append(BuildTrial(pins, fmt, values, met))
        said = f"{pins_text(pins)} on {self._builds.name}: {values}: {'holds' if met else 'misses'}"
        self._progress.note(said)
        self._keep_only(plan, met)
        return met

    def _measured(self, plan: Plan, pins: str) -> Metrics:
        """Metrics of the engine over the report's batches, from an earlier run where that built it."""
        variants, key = self._search.variants, frozenset({plan_sha256(plan)})
        outcomes = [self._store.find(key, batch) for batch in self._batches]
        known = [outcome for outcome in outcomes if outcome is not None]
        if len(known) == len(outcomes):
            return variants.total(known)
        self._progress.start(f"building with {self._builds.name}: {pins}", None)
        measured = []
        with self._builds.open(self._subject(plan), self.identity(plan)) as engine:
            for batch in self._batches:
                measured.append(variants.measured(batch, lambda feed: _floats(engine, feed)))
        for batch, outcome in zip(self._batches, measured, strict=True):
            self._store.keep(key, batch, outcome)
        return variants.total(measured)

    def _keep_only(self, plan: Plan, met: bool) -> None:
        """Engines are large: the first stays, and the last one that holds."""
        stale = self._good if met else plan
        self._good = plan if met else self._good
        if stale is not None and stale != self._found.chosen.plan:
            self._builds.drop(self._out, self.identity(stale))

    def _named(self, ids: frozenset[str]) -> list[str]:
        return [c.id for c in self._search.candidates if c.id in ids]

    def _plan(self, ids: frozenset[str], fmt: str) -> Plan:
        found = self._found
        if ids == self._first and (fmt == found.format or not ids):
            return found.chosen.plan
        return pinned(self._search, self._named(ids), fmt)

    def _subject(self, plan: Plan) -> Subject:
        search = self._search
        planned = search.planned.with_plan(plan)
        typed = planned.apply(read_scales(planned, search.table or None))
        return Subject(planned, typed, self._feeds, self._out)

    @cached_property
    def _feeds(self) -> Feeds:
        """Of the report's batches: shapes to build for."""
        settings = self._search.settings
        source, labelled = settings.holdout or settings.data, settings.metric is not None
        return open_feeds(source, self._search.planned.model.inputs, settings.limit, labelled=labelled)

    def identity(self, plan: Plan) -> Identity:
        """What an engine of this plan is built from."""
        search = self._search
        needs_table = search.table and search.planned.with_plan(plan).activations
        table = sha256_of(Path(search.table)) if needs_table else ""
        return Identity(search.planned.model.sha256, plan_sha256(plan), table)


def _floats(engine: Runs, feed: Feed) -> dict[str, Array]:
    """Outputs as the reference has them: the engine's may be in half precision."""
    return {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in engine.run(feed).items()}


def _with_pins_of(found: Found, on_builds: OnBuilds, plan: Plan) -> Found:
    """The same with the pins found on builds in the place of the emulation's."""
    search, pins = found.search, list(on_builds.found.pins)
    words = f"{len(pins)} pin{'' if len(pins) == 1 else 's'} in {on_builds.format.upper()}, found on builds"
    chosen = weigh(search, plan, words, "chosen", len(pins))
    before: Weighed = replace(found.chosen, kind="candidate")
    points = [before if point is found.chosen else point for point in found.points]
    choice = PinSearch("found", pins, on_builds.found.minimal, found.pins.tried, used_held_out=True)
    return replace(
        found,
        pins=choice,
        format=on_builds.format,
        chosen=chosen,
        points=[*points, chosen],
        builds=on_builds,
    )
