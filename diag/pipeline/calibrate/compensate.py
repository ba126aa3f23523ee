"""Better scales before pins: an FP32-equivalent model, its table, and what each step brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from diag.calibration.measurement import table_of
from diag.calibration.records import channels_text
from diag.calibration.run import RunOptions, measure
from diag.calibration.samples import CalibrationFeeds, open_calibration_feeds
from diag.calibration.table import BEST, SEARCHED, CalibrationTable, Compensation, write_table
from diag.compensation.draft import Draft, Lowering, activations
from diag.compensation.proposals import Workplace
from diag.compensation.rows import Batch
from diag.compensation.rules import compensation_rules
from diag.compensation.run import STEPS, Compensated, compensate
from diag.compensation.trial import Bench, Damage, noise_over_signal
from diag.engines.reference import examine
from diag.errors import ModelError, NotEnoughEvidenceError, UsageError
from diag.feeds import Feeds, open_feeds
from diag.files import output_file
from diag.model.load import load_model
from diag.model.save import save_model
from diag.numerics.formats import FORMATS
from diag.pipeline.calibrate.tables import known_method
from diag.pipeline.compare.kinds import tensor_kinds
from diag.pipeline.prepare import Planned, before_last_third, plan_on
from diag.plan.schema import Plan, plan_for_format, read_plan
from diag.progress import Progress

_FORMATS = ("int8", "fp8")


@dataclass(frozen=True)
class CompensateSettings:
    """Options of `trtdiag calibrate --compensate`, in its terms."""

    model: str
    data: str
    out: str
    """File for the table."""
    model_out: str
    """File for the new model."""
    holdout: str | None = None
    limit: int | None = None
    method: str | None = None
    plan: str | None = None
    format: str = "int8"
    """Of a plan without pins, where there is no plan."""
    steps: tuple[str, ...] = tuple(STEPS)
    damage: Damage = noise_over_signal
    """What the outputs are judged by."""


@dataclass(frozen=True)
class CompensationJob:
    """A model ready to be compensated."""

    settings: CompensateSettings
    planned: Planned
    lowering: Lowering
    measured: CalibrationTable
    """Ranges of the model as it came, with all methods."""
    place: Workplace
    bench: Bench

    def run(self, steps: Sequence[str], progress: Progress) -> Compensated:
        """Try the steps. A plan that names its method keeps those ranges."""
        chosen = [step for step in steps if step != "scale" or self.planned.method is None]
        draft = Draft(self.planned.model, self.measured.tensors, self.measured.method)
        return compensate(self.place, self.bench, draft, chosen, progress)

    def write(self, found: Compensated, model_out: Path, out: Path) -> CalibrationTable:
        """Write model and table. The table carries the fingerprint of the model as it was written."""
        draft = found.draft
        save_model(draft.model.proto, draft.model.weights, model_out)
        tensors = dict(draft.ranges)
        if draft.searched:
            tensors = {
                name: entry.model_copy(update={"searched": draft.limit(name)})
                for name, entry in tensors.items()
            }
        update = {
            "model_sha256": load_model(str(model_out)).sha256,
            "method": SEARCHED if draft.searched else self.measured.method,
            "tensors": tensors,
            "compensation": self._compensation(found),
        }
        table = self.measured.model_copy(update=update)
        write_table(table, out)
        return table

    def _compensation(self, found: Compensated) -> Compensation:
        draft = found.draft
        return Compensation(
            format=self.lowering.format,
            original_sha256=self.planned.model.sha256,
            fp32_max_abs=found.difference.max_abs,
            fp32_rel_l2=found.difference.rel_l2,
            credits=tuple(found.credits),
            weight_ratios={name: channels_text(v) or "" for name, v in draft.weight_ratios.items()},
            corrections={name: channels_text(v) or "" for name, v in draft.corrections.items()},
        )


@dataclass(frozen=True)
class _Data:
    calibration: CalibrationFeeds
    held: Sequence[Batch]


def compensate_model(
    settings: CompensateSettings, progress: Progress
) -> tuple[CalibrationTable, Compensated]:
    """Find, prove and write what makes the quantized model lose less: a model and its table.

    Without `holdout` the last third of the batches is held out. Raises NotEnoughEvidenceError when there is
    one batch only, ModelError when nothing is to be quantized, UsageError and PlanError as their names say.
    """
    _refuse_one_file(settings)
    model_out, out = output_file(settings.model_out), output_file(settings.out)
    job = begin(settings, progress)
    found = job.run(settings.steps, progress)
    return job.write(found, model_out, out), found


def _refuse_one_file(settings: CompensateSettings) -> None:
    model, new, table = (Path(p).resolve() for p in (settings.model, settings.model_out, settings.out))
    if new == model:
        raise UsageError(
            "the new model would replace the one it is made from", "Give --model-out another name."
        )
    if table in (model, new):
        which = "model" if table == model else "new model"
        raise UsageError(f"the table would replace the {which}", "Give --out another name.")


def begin(settings: CompensateSettings, progress: Progress) -> CompensationJob:
    """Load the model, measure its ranges, and set up what judges the steps."""
    planned = plan_on(settings.model, _plan(settings))
    lowering = _lowering(planned)
    method = _method(settings, planned)
    data = _data(settings, planned)
    operands = lowering.operands(planned.model)
    if not operands:
        raise ModelError("the plan quantizes no activation", "Nothing to compensate.")
    tensors = activations(operands)
    counted = measure(planned.model, tensors, data.calibration, RunOptions(), progress)
    measured = table_of(counted, planned.model.sha256, method)
    place, bench = _judges(settings, planned, lowering, data, progress)
    return CompensationJob(settings, planned, lowering, measured, place, bench)


def _plan(settings: CompensateSettings) -> Plan:
    return read_plan(settings.plan) if settings.plan is not None else plan_for_format(settings.format)


def _lowering(planned: Planned) -> Lowering:
    quantized = {fmt for fmt in planned.resolved.formats.values() if FORMATS[fmt].quantized}
    if len(quantized) != 1 or not quantized <= set(_FORMATS):
        raise UsageError(
            f"compensation needs a plan with one of {' and '.join(_FORMATS)} (this one has "
            f"{', '.join(sorted(quantized)) or 'none'})",
            "Compensate the layers of one format at a time.",
        )
    plan = planned.plan
    formats, beyond = planned.resolved.formats, plan.constants.out_of_range
    return Lowering(formats, plan.base, quantized.pop(), beyond, planned.fused)


def _method(settings: CompensateSettings, planned: Planned) -> str:
    """The method whose ranges are the start; `best` is one of the steps here."""
    method = known_method(settings.method) or planned.method or "minmax"
    if method == BEST:
        raise UsageError(
            "compensation chooses among the ranges of all methods itself", "Leave out --method best."
        )
    return method


def _data(settings: CompensateSettings, planned: Planned) -> _Data:
    inputs = planned.model.inputs
    feeds = open_calibration_feeds(settings.data, inputs, settings.limit, False)
    if settings.holdout is not None:
        return _Data(feeds, _held(open_feeds(settings.holdout, inputs, settings.limit), 0))
    total = len(feeds)
    if total < 2:
        raise NotEnoughEvidenceError(
            "one batch cannot both calibrate and judge", "Give 2 batches or more, or --holdout DATA."
        )
    kept = before_last_third(total)
    return _Data(open_calibration_feeds(settings.data, inputs, kept, False), _held(feeds, kept))


def _held(feeds: Feeds, first: int) -> list[Batch]:
    """Batches to judge on, spread evenly from number `first` on; no others are kept in memory."""
    count = len(feeds) - first
    chosen = set(
        first + np.linspace(0, count - 1, min(compensation_rules().judge_batches, count)).astype(int)
    )
    return [batch for number, batch in enumerate(feeds) if number in chosen]


def _judges(
    settings: CompensateSettings, planned: Planned, lowering: Lowering, data: _Data, progress: Progress
) -> tuple[Workplace, Bench]:
    rules = compensation_rules()
    progress.start("examining the FP32 reference", None)
    trust = examine(planned.model, data.held[0], planned.types)
    kinds = tensor_kinds(planned, trust)
    bench = Bench(lowering, planned.model, data.held, kinds, trust, rules, settings.damage)
    searched = list(islice(data.calibration, rules.search_batches))
    roles = {layer: role.name for layer, role in planned.roles.items()}
    place = Workplace(lowering, data.calibration, searched, data.held[: rules.search_batches], roles, rules)
    return place, bench
