"""Brings TensorRT calibration caches in and out: `trtdiag calibrate --import` and `--export`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diag.calibration.cache_names import CacheNames, match_names
from diag.calibration.cache_table import cache_from_table, refuse_foreign, table_from_cache
from diag.calibration.measurement import Measurement, table_of
from diag.calibration.ranges import imported_cost
from diag.calibration.run import RunOptions, measure
from diag.calibration.samples import open_calibration_feeds
from diag.calibration.scale_rules import scale_rules
from diag.calibration.table import IMPORTED, SEARCHED, CalibrationTable, TensorRange, read_table, write_table
from diag.engines.scale_cache import ScaleCache, read_scale_cache
from diag.files import output_file, write_text
from diag.pipeline.calibrate.tables import known_method
from diag.pipeline.inspect.cache import finding_on, judge_cache, worst_first
from diag.pipeline.prepare import Planned, plan_on
from diag.plan.schema import plan_for_format, read_plan
from diag.progress import Progress
from diag.report.schema import Finding


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Options of `trtdiag calibrate --import`, in its terms."""

    model: str
    cache: str
    out: str
    data: str | None = None
    """What the scales are held against; None: nothing is measured."""
    plan: str | None = None
    limit: int | None = None
    jobs: int = 1
    skip_bad: bool = False


@dataclass(frozen=True)
class Imported:
    """A cache as a table, and what there is to say about it."""

    cache: ScaleCache
    names: CacheNames
    needed: tuple[str, ...]
    """Tensors that the plan quantizes."""
    table: CalibrationTable
    ratios: Mapping[str, float]
    """Stored range over the fresh one, by tensor; empty when nothing was measured."""
    compared_with: str
    """Method of the fresh ranges."""
    findings: tuple[Finding, ...]

    @property
    def covered(self) -> int:
        """How many of `needed` have a usable scale."""
        return sum(name in self.table.tensors for name in self.needed)


def import_cache(settings: ImportSettings, progress: Progress) -> Imported:
    """Map a cache onto the model, hold it against fresh data where there are some, and write the table.

    Raises TableError when the cache is another model's, or gives a tensor a scale of zero or NaN.
    """
    out = output_file(settings.out, settings.model, settings.cache)
    cache = read_scale_cache(settings.cache)
    planned = plan_on(settings.model, read_plan(settings.plan) if settings.plan else plan_for_format("int8"))
    names = match_names(cache.scales, planned.model)
    refuse_foreign(settings.cache, names, planned.activations)
    table = table_from_cache(settings.cache, cache, names, planned.model)
    findings = judge_cache(cache, names, planned.activations)
    method, ratios = fresh_method(cache), dict[str, float]()
    if settings.data is not None:
        fresh = _measured(settings, planned, table, progress)
        ratios = scale_ratios(table, fresh, method)
        findings = worst_first([*findings, *stale(ratios)])
        table = fresh
    write_table(table, out)
    return Imported(cache, names, planned.activations, table, ratios, method, tuple(findings))


def fresh_method(cache: ScaleCache) -> str:
    """The method of ours that does what the cache's calibrator did; min-max where there is none."""
    return "entropy" if cache.algorithm.startswith("Entropy") else "minmax"


def _measured(
    settings: ImportSettings, planned: Planned, table: CalibrationTable, progress: Progress
) -> CalibrationTable:
    """The table with everything that fresh data say about its tensors, the imported ranges still in use."""
    model = planned.model
    feeds = open_calibration_feeds(str(settings.data), model.inputs, settings.limit, settings.skip_bad)
    floats = tuple(n for n in table.tensors if n in planned.types and planned.types[n].is_float)
    found = measure(model, floats, feeds, RunOptions(settings.skip_bad, settings.jobs), progress)
    progress.start("computing ranges", None)
    fresh = table_of(found, model.sha256, IMPORTED)
    tensors = dict(table.tensors) | {name: _beside(name, fresh, table, found) for name in floats}
    words = f"{table.data}, held against {fresh.data}"
    return fresh.model_copy(update={"tensors": tensors, "data": words, "cache": table.cache})


def _beside(name: str, fresh: CalibrationTable, table: CalibrationTable, found: Measurement) -> TensorRange:
    """A tensor's fresh ranges, and the imported one with what it costs on the fresh data."""
    imported = imported_cost(found.tensors[name], table.tensors[name].absmax)
    measured = fresh.tensors[name]
    return measured.model_copy(update={"methods": {**measured.methods, IMPORTED: imported}})


def scale_ratios(stored: CalibrationTable, fresh: CalibrationTable, method: str) -> dict[str, float]:
    """Imported range over the fresh range by `method`, of each tensor that was measured and is not zero."""
    ratios = {}
    for name, known in stored.tensors.items():
        measured = fresh.tensors[name]
        limit = measured.range_of(method) if measured.evidence is not None else None
        if limit:
            ratios[name] = known.absmax / limit
    return ratios


def stale(ratios: Mapping[str, float]) -> list[Finding]:
    """Scales that are far from what fresh data give, worst first."""
    rules = scale_rules()
    off = {name: max(ratio, 1 / ratio) for name, ratio in ratios.items() if ratio > 0}
    worst = sorted(off, key=off.__getitem__, reverse=True)
    found = []
    for severity, low, high in (
        ("error", rules.ratio_error, float("inf")),
        ("warning", rules.ratio_warning, rules.ratio_error),
    ):
        names = [name for name in worst if low < off[name] <= high]
        if names:
            title = f"{len(names)} scales are off by a factor of more than {low:g} from fresh data"
            ratio = ratios[names[0]]
            found.append(finding_on(f"stale-{severity}", severity, title, names, worst_ratio=ratio))
    return found


def export_cache(table_path: str, out: str, version: str | None, method: str | None) -> tuple[str, int]:
    """Write a table's scales as a TensorRT cache; the method that was used, and the number of entries.

    Raises TableError and UsageError as `cache_from_table` does, UsageError for a method that does not exist.
    """
    asked = method if method in (IMPORTED, SEARCHED) else known_method(method)
    table = read_table(table_path)
    text = cache_from_table(table, version, asked)
    write_text(text, output_file(out, table_path))
    return asked or table.method, text.count("\n") - 1
