"""Compares a tiny faulty model with the real pipeline, and runs the plan that its findings ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from diag.pipeline.compare.job import compare
from diag.pipeline.settings import CompareSettings
from diag.progress import Silent
from diag.report.schema import Finding, Report
from fixtures.graphs.sketch import Recipe

PLAN = "schema: trtdiag.plan/1\ndefault: {fmt}\nconstants: {{out_of_range: {policy}}}\n"


@dataclass(frozen=True)
class Outcome:
    """A report, and where its plans are."""

    report: Report
    folder: Path
    model: Path
    data: Path

    @property
    def output(self) -> dict[str, float]:
        return self.report.outputs[0].metrics

    @property
    def births(self) -> list[str]:
        """Where errors begin that reach an output."""
        return [birth.layer for birth in self.report.births if birth.reaches_output]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.report.findings if finding.severity == "error"]

    def kinds(self, severity: str) -> list[str]:
        return [finding.kind for finding in self.report.findings if finding.severity == severity]

    def mended(self) -> dict[str, float]:
        """Metrics of the output under the plan that the findings wrote."""
        out = self.folder / "mended"
        settings = CompareSettings(
            model=str(self.model), data=str(self.data), out=str(out), plan=str(self.folder / "mend.yaml")
        )
        return compare(settings, Silent()).outputs[0].metrics

    @property
    def pinned(self) -> set[str]:
        return {pin.target for finding in self.report.findings for pin in finding.mend.pins}


def run(
    folder: Path, model: ModelProto, feeds: dict[str, NDArray[Any]], fmt: str = "fp16", policy: str = "clamp"
) -> Outcome:
    """The pipeline's comparison of one batch."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "data.npz", **feeds)
    (folder / "plan.yaml").write_text(PLAN.format(fmt=fmt, policy=policy), encoding="utf-8")
    settings = CompareSettings(
        model=str(folder / "model.onnx"),
        data=str(folder / "data.npz"),
        out=str(folder / "out"),
        plan=str(folder / "plan.yaml"),
    )
    return Outcome(compare(settings, Silent()), folder / "out", folder / "model.onnx", folder / "data.npz")


def run_recipe(folder: Path, recipe: Recipe, fmt: str = "fp16", policy: str = "clamp") -> Outcome:
    return run(folder, recipe.model, recipe.feeds, fmt, policy)
