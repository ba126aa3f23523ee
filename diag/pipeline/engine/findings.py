"""What is wrong with an engine itself, as findings of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diag.compare.layout import Layout
from diag.compare.split import Kind, Verdict
from diag.model.graph import Model
from diag.report.schema import Finding, Mend

_KINDS: Mapping[Kind, tuple[str, Literal["error", "warning", "note"]]] = {
    "engine-defect": ("engine-defect", "error"),
    "batch-or-shape": ("batch-or-shape", "error"),
    "nondeterministic": ("nondeterministic-build", "warning"),
    "observer-effect": ("observer-effect", "warning"),
    "tf32-default": ("tf32-default", "note"),
    "unclear": ("engine-defect", "note"),
}
"""The report's name of each verdict, and how bad it is; the others are no findings."""

_MENDS: Mapping[Kind, str] = {
    "engine-defect": "Advice on precision is pointless here. Look at the known issues, try another TensorRT "
    "version, or keep the fusion apart: export one of its inner tensors as an output and compare.",
    "batch-or-shape": "No matter of precision: run rows one by one or at the optimum shape until it is "
    "mended, and report it with the kernels that span the batch.",
    "nondeterministic": "Compare with this spread in mind, and gate on the worst of several runs.",
    "observer-effect": "Compare final outputs of unmarked engines; to localise, cut the graph.",
    "tf32-default": "Build with TF32 off to have FP32, at a price in time; it is no defect.",
    "unclear": "Measure the noise floor of a rebuild, and compare at an FP32 engine, to tell.",
}


@dataclass(frozen=True)
class Faults:
    """What was found out about the outputs of an engine, by output."""

    verdicts: Mapping[str, Verdict]
    observed: Mapping[str, Verdict]
    """Whether marking tensors changes them."""
    moved: Mapping[str, Layout]
    """Where values are right and places wrong."""
    model: Model


def fault_findings(faults: Faults) -> list[Finding]:
    """One finding for each kind of verdict, all its outputs in it, the worst first."""
    groups: dict[Kind, dict[str, Verdict]] = {}
    for verdicts in (faults.verdicts, faults.observed):
        for name, verdict in verdicts.items():
            if verdict.kind in _KINDS:
                groups.setdefault(verdict.kind, {})[name] = verdict
    found = [_finding(kind, members, faults) for kind, members in groups.items()]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _finding(kind: Kind, verdicts: Mapping[str, Verdict], faults: Faults) -> Finding:
    name, severity = _KINDS[kind]
    output, worst = max(verdicts.items(), key=lambda item: item[1].numbers.get("total_rel_l2", 0.0))
    layout = next((faults.moved[n] for n in verdicts if n in faults.moved), None)
    producers = (faults.model.producers.get(n) for n in verdicts)
    evidence: dict[str, float | str | bool] = {"output": output, **worst.numbers}
    title = f"output {output}: {worst.text}"
    if layout is not None:
        evidence |= {"layout": layout.kind, "sorted_rel_l2": layout.sorted_rel_l2}
        title = f"{title}; {layout.text}"
    return Finding(
        id=f"engine-{kind}",
        kind=name,
        severity=severity,
        layers=[producer.id for producer in producers if producer is not None],
        title=title,
        evidence=evidence,
        mend=Mend(text=_MENDS[kind]),
    )
