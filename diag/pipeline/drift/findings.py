"""What a drift report says in words: the verdict, and the findings with what mends them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from diag.report.drift import Drift, DriftTensor
from diag.report.schema import Finding, Mend

_SAID = {
    "sqnr_loss_db": "{value:.1f} dB of SQNR are lost",
    "saturation": "{percent:.2g} % of its values are clipped",
    "overflow": "its p99.99 is {value:.2f} of the range",
    "under_use": "the range is {value:.1f} times as wide as its values",
    "wasserstein_steps": "its values moved by {value:.1f} steps",
}


def verdict_sentence(drift: Drift) -> str:
    """One sentence."""
    where = f"{drift.production_requests:,} production requests"
    hints = [advice.text for advice in drift.advice if advice.action == "fix-preprocessing"]
    if drift.level == "ok" and hints:
        return f"No range drifts over {where}, but: {hints[0]}"
    if drift.level == "ok":
        return f"No drift: the calibrated ranges fit all {len(drift.tensors)} tensors over {where}."
    cause = _cause(drift)
    word = "Drift" if drift.level == "fail" else "A small shift"
    behind = f", and in {len(drift.consequences)} behind it" if drift.consequences else ""
    since = f" since {drift.began}" if drift.began else ""
    where = f" in {drift.focus}{_others(drift)}" if drift.focus and not drift.began else ""
    return f"{word}{since}{where} begins at {cause.tensor}{behind}: {said(cause)}."


def _others(drift: Drift) -> str:
    drifting = sum(part.level == "fail" for part in drift.slices)
    return f" ({drifting} of {len(drift.slices)} slices drift)" if drifting > 1 else ""


def said(tensor: DriftTensor) -> str:
    """What shows a tensor's drift, the primary figure first."""
    if tensor.nonfinite:
        verb = "is" if tensor.nonfinite == 1 else "are"
        return f"{tensor.nonfinite:,} of its values {verb} not finite"
    shown = [name for name, figure in tensor.figures.items() if figure.level == tensor.level]
    name = shown[0] if shown else "sqnr_loss_db"
    value = tensor.figures[name].value
    if math.isinf(value):
        return "its values are all zero"
    return _SAID[name].format(value=value, percent=100 * value)


def findings_of(drift: Drift) -> list[Finding]:
    """Drift itself, values that are not finite, and a cost that does not lie where the drift does."""
    return [*_drifted(drift), *_nonfinite(drift), *_cost(drift)]


def _cause(drift: Drift) -> DriftTensor:
    return next(tensor for tensor in drift.tensors if tensor.tensor == drift.cause)


def _drifted(drift: Drift) -> Iterator[Finding]:
    if drift.level == "ok":
        hints = [a for a in drift.advice if a.action == "fix-preprocessing"]
        for number, advice in enumerate(hints, 1):
            yield Finding(
                id=f"preprocessing-{number}",
                kind="drift",
                severity="warning",
                layers=advice.tensors,
                title=advice.text.rstrip("."),
                mend=Mend(text="Fix the preprocessing of production.", command=advice.command),
            )
        return
    cause = _cause(drift)
    names = {tensor.tensor: tensor.layer or tensor.tensor for tensor in drift.tensors}
    first = drift.advice[0] if drift.advice else None
    yield Finding(
        id="drift-1",
        kind="drift",
        severity="error" if drift.level == "fail" else "warning",
        layers=list(dict.fromkeys(names[name] for name in (cause.tensor, *drift.consequences))),
        title=f"Production{_focus(drift)} differs from calibration at {cause.tensor}: {said(cause)}",
        evidence=_evidence(cause),
        mend=Mend(text=first.text, command=first.command) if first else Mend(),
    )


def _focus(drift: Drift) -> str:
    return f" ({drift.focus})" if drift.focus else ""


def _evidence(cause: DriftTensor) -> dict[str, float | str | bool]:
    low, high = cause.saturation_interval
    return {
        "calibration_sqnr_db": cause.calibration_sqnr_db,
        "production_sqnr_db": cause.production_sqnr_db,
        **{name: figure.value for name, figure in cause.figures.items()},
        "saturation_low": low,
        "saturation_high": high,
        "clipped_energy_ratio": cause.clipped_energy_ratio,
        "absmax_ratio": cause.absmax_ratio,
    }


def _nonfinite(drift: Drift) -> Iterator[Finding]:
    broken = [tensor for tensor in drift.tensors if tensor.nonfinite]
    if broken:
        total = sum(tensor.nonfinite for tensor in broken)
        yield Finding(
            id="not-finite-1",
            kind="drift",
            severity="error",
            layers=[tensor.layer or tensor.tensor for tensor in broken],
            title=f"{total:,} values of production are NaN or infinite, first in {broken[0].tensor}",
            mend=Mend(text="Look at the worst requests; they are left out of all other figures."),
        )


def _cost(drift: Drift) -> Iterator[Finding]:
    if drift.costs_agree is False:
        yield Finding(
            id="drift-and-cost-1",
            kind="drift",
            severity="note",
            layers=[cost.layer for cost in drift.costs[:5]],
            title=f"Drift and INT8 error disagree. {drift.costs_sentence}",
            mend=Mend(text="Rank the layers on production data: trtdiag rank."),
        )
