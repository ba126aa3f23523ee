"""What `trtdiag calibrate --import` and `--export` say about TensorRT calibration caches."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from diag.cli.console import Output, with_bar
from diag.errors import UsageError
from diag.pipeline.calibrate.cache_import import Imported, ImportSettings, export_cache, import_cache


def refuse_idle(data: str | None, measures: bool, all_tensors: bool) -> None:
    """Raise UsageError for options of a measurement that an import does not make."""
    if all_tensors:
        raise UsageError("an import has the tensors of its cache", "Leave out --all-tensors.")
    if data is None and measures:
        raise UsageError(
            "without --data an import measures nothing", "Leave out --limit, --jobs and --skip-bad."
        )


def import_(settings: ImportSettings, method: str | None, output: Output) -> int:
    """Import a cache and say how it fits; a method cannot be chosen, since the cache has its own."""
    if method is not None:
        raise UsageError("an imported cache brings its scales", "Leave out --method.")
    silent = output.quiet or output.as_json
    imported = with_bar(silent, lambda progress: import_cache(settings, progress))
    output.result(_as_json(imported, settings.out), lambda: "\n".join(_lines(imported, settings.out)))
    return 0


def export(table_path: str, out: str, version: str | None, method: str | None, output: Output) -> int:
    """Write a table as a cache."""
    used, entries = export_cache(table_path, out, version, method)
    result = {"cache": out, "entries": entries, "method": used}
    output.result(result, lambda: f"{entries} scales ({used}) written: {out}")
    return 0


def _as_json(imported: Imported, out: str) -> dict[str, Any]:
    names = imported.names
    return {
        "table": out,
        "version": imported.cache.version,
        "algorithm": imported.cache.algorithm,
        "entries": len(imported.cache.scales),
        "tensors": len(imported.table.tensors),
        "needed": len(imported.needed),
        "covered": imported.covered,
        "missing": [name for name in imported.needed if name not in imported.table.tensors],
        "constants": list(names.constants),
        "inside_layers": list(names.inside),
        "made_by_tensorrt": len(names.made),
        "unmatched": list(names.unmatched),
        "compared_with": imported.compared_with if imported.ratios else None,
        "ratios": dict(imported.ratios),
        "findings": [finding.model_dump() for finding in imported.findings],
    }


def _lines(imported: Imported, out: str) -> Iterator[str]:
    cache, names = imported.cache, imported.names
    written = f"{cache.version}, {cache.algorithm}"
    yield f"{len(imported.table.tensors)} scales imported from TensorRT {written}: {out}"
    yield f"they cover {imported.covered} of {len(imported.needed)} tensors that are quantized"
    yield (
        f"{len(cache.scales)} entries: {len(names.activations)} tensors, {len(names.constants)} constants, "
        f"{len(names.inside)} inside layers, {len(names.made)} of TensorRT's own, "
        f"{len(names.unmatched)} unknown"
    )
    if imported.ratios:
        ratios = sorted(imported.ratios.values())
        yield (
            f"stored range over a fresh {imported.compared_with} range: {ratios[0]:.3g} to {ratios[-1]:.3g}, "
            f"median {median(ratios):.3g}, {len(ratios)} tensors"
        )
    for finding in imported.findings:
        yield f"{finding.severity}: {finding.title}: {finding.evidence['first']}"
