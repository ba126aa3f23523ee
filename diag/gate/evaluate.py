"""The gate: a pure function from a report and thresholds to a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diag.errors import UsageError
from diag.gate.drift import drift_checks, require_tensors
from diag.gate.threshold import Threshold, require_outputs
from diag.numerics.table import METRICS
from diag.report.schema import Check, GateResult, OutputInfo, Report


def evaluate(report: Report, thresholds: Sequence[Threshold]) -> GateResult:
    """Check every threshold on the output that it names, or on each output.

    Nothing passes for lack of evidence: a missing metric, NaN, an output without elements and a report
    without outputs all fail. An output with non-finite elements fails every threshold on its quality,
    because the other metrics may leave those elements out, unless a threshold on `nonfinite` says how
    many are allowed.

    Thresholds on drift are checked on the tensor that they name, or on the worst one.

    Raises UsageError when no threshold is given, or one names an output or tensor that the report lacks.
    """
    if not thresholds:
        raise UsageError("the gate has nothing to check", 'Give a threshold such as "sqnr_db>=30".')
    require_outputs(thresholds, [output.name for output in report.outputs])
    require_tensors(thresholds, report.drift)
    tolerant = {item.output for item in thresholds if item.metric == "nonfinite"}
    checks = [
        check
        for item in thresholds
        for check in (
            drift_checks(item, report.drift) if item.of_drift else _checks(item, report.outputs, tolerant)
        )
    ]
    return GateResult(passed=all(check.passed for check in checks), checks=checks)


def _checks(item: Threshold, outputs: list[OutputInfo], tolerant: set[str | None]) -> Iterator[Check]:
    chosen = [output for output in outputs if item.output in (None, output.name)]
    if not chosen:
        yield Check(name=f"{item} (the report has no outputs)", value=None, bound=item.bound, passed=False)
    for output in chosen:
        allowed = None in tolerant or output.name in tolerant
        yield _check(item, output, allowed)


def _check(item: Threshold, output: OutputInfo, nonfinite_allowed: bool) -> Check:
    value = output.metrics.get(item.metric)
    doubt = _doubt(item, output, nonfinite_allowed)
    note = f" ({doubt})" if doubt else (" (magnitude)" if item.by_magnitude else "")
    return Check(
        name=f"{output.name}:{item.condition}{note}",
        value=value,
        bound=item.bound,
        passed=not doubt and item.holds(value),
    )


def _doubt(item: Threshold, output: OutputInfo, nonfinite_allowed: bool) -> str:
    """Why the value must not be believed, or an empty string."""
    metrics = output.metrics
    if item.metric not in metrics:
        return "not measured"
    informative = METRICS[item.metric].better == "none"
    if metrics.get("elements", 1.0) == 0 and not informative:
        return "no elements compared"
    broken = metrics.get("nonfinite", 0.0)
    # NaN counts as broken too, hence not `> 0`.
    if not broken <= 0 and not nonfinite_allowed and not informative:
        return f"{broken:g} elements are not finite"
    return ""
