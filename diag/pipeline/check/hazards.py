"""Hazards of the lint as findings of a report."""

from __future__ import annotations

from collections.abc import Sequence

from diag.lint.hazard import Hazard
from diag.report.schema import Finding, Mend, PinInfo


def findings_from(hazards: Sequence[Hazard]) -> list[Finding]:
    """One finding for each hazard; nothing was run, so none is known to be responsible."""
    return [
        Finding(
            id=hazard.id,
            kind=hazard.kind,
            severity=hazard.severity,
            layers=list(hazard.layers),
            title=hazard.title,
            evidence=dict(hazard.evidence),
            mend=Mend(
                text=hazard.mend,
                pins=[
                    PinInfo(target=name, format="fp32", reason=hazard.id, layers=1) for name in hazard.pins
                ],
            ),
        )
        for hazard in hazards
    ]
