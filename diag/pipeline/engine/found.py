"""What the engine stage of a comparison found, and how it goes into the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from diag.compare.selfcheck import SelfCheck
from diag.compare.split import Verdict
from diag.engines.latency import Latency
from diag.kernels.kernel import Kernel
from diag.pipeline.engine.run import OutputErrors
from diag.pipeline.inspect.report import kernel_infos
from diag.report.schema import Finding, Metrics, Report


@dataclass
class EngineFound:
    """What the engine stage adds to a report. Everything but kernels is empty where it could not be run."""

    label: str
    versions: dict[str, str]
    flags: dict[str, str]
    kernels: tuple[Kernel, ...]
    built: dict[str, str] = field(default_factory=dict)
    """Type in which each layer was built, `folded` where no kernel names it."""
    findings: list[Finding] = field(default_factory=list)
    outputs: OutputErrors = field(default_factory=OutputErrors)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    checks: list[SelfCheck] = field(default_factory=list)
    layers: dict[str, Metrics] = field(default_factory=dict)
    """By tensor: errors of what lies between the kernels that ship."""
    latency: Latency | None = None
    notes: list[str] = field(default_factory=list)

    def put_into(self, report: Report) -> None:
        """Add everything to a report that holds the comparison of the emulation."""
        report.run.engine = f"{self.label}; {report.run.engine}"
        report.run.versions |= self.versions
        report.run.flags |= self.flags
        if self.notes:
            report.run.flags["engine notes"] = "; ".join(self.notes)
        report.kernels = kernel_infos(self.kernels)
        report.findings = [*self.findings, *report.findings]
        for output in report.outputs:
            if output.name in self.outputs.engine:
                output.engine = self.outputs.engine[output.name].metrics()
                output.engine_vs_emulation = self.outputs.engine_vs_emulation[output.name].metrics()
        for layer in report.layers:
            seen = [name for name in layer.outputs if name in self.layers]
            layer.built = self.built.get(layer.id, "")
            layer.engine = min((self.layers[n] for n in seen), key=lambda m: m["sqnr_db"], default={})
        if self.verdicts:
            worst = max(
                self.verdicts.values(), key=lambda v: (v.is_fault, v.numbers.get("total_rel_l2", 0.0))
            )
            report.verdict = f"{report.verdict} Engine: {worst.text}."
