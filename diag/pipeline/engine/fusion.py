"""Is fusion the cause? The same typed model built with less of it, against the emulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diag.compare.record import Array
from diag.compare.split import engine_rules
from diag.errors import EngineError
from diag.pipeline.engine.run import output_gaps
from diag.report.schema import Finding, Mend

Outputs = Mapping[str, Array]

EXPERIMENTS = {
    "optimisation level 0": "unfused",
    "every tensor kept apart": "apart",
}
"""What each experiment changes, in words, and the name of its build."""


_CURED_SHARE = 1 / 3
"""An experiment cures when it leaves at most this share of the gap."""


@dataclass(frozen=True)
class Experiment:
    """One build beside the shipped one: how far each output is from the emulation (relative L2)."""

    change: str
    gaps: Mapping[str, float]


def run_experiments(
    build_and_run: Callable[[str], Outputs], emulated: Outputs, note: Callable[[str], None]
) -> list[Experiment]:
    """Run every experiment that builds; `build_and_run` takes the name of the build.

    One that fails is noted and costs only its own answer.
    """
    done = []
    for change, name in EXPERIMENTS.items():
        try:
            done.append(Experiment(change, output_gaps(emulated, build_and_run(name))))
        except EngineError as error:
            note(f"fusion experiment with {change} failed: {error.problem}")
    return done


def fusion_finding(shipped: Mapping[str, float], experiments: list[Experiment]) -> Finding | None:
    """Whether an experiment takes the engine's own error away; None when the shipped engine has none.

    `shipped` gives each output's distance from the emulation. Fusion is the cause when an experiment brings
    it below what the rules call good, or to a third.
    """
    output, gap = max(shipped.items(), key=lambda item: _size(item[1]), default=("", 0.0))
    tolerance = engine_rules().good_rel_l2
    if not experiments or _size(gap) <= tolerance:
        return None
    best = min(experiments, key=lambda e: _size(e.gaps.get(output, math.inf)))
    left = best.gaps.get(output, math.inf)
    cured = _size(left) <= tolerance or (_size(left) < math.inf and _size(left) <= _CURED_SHARE * _size(gap))
    title = (
        f"fusion is the cause at output {output}: with {best.change} the engine agrees with the emulation"
        if cured
        else f"fusion is not the cause at output {output}: no experiment brings the engine to the emulation"
    )
    evidence: dict[str, float | str | bool] = {"output": output, "shipped_rel_l2": gap}
    evidence |= {f"rel_l2 with {e.change}": e.gaps.get(output, math.inf) for e in experiments}
    text = (
        "Keep an inner tensor apart (export it as an output), or change the pattern, and report the kernels."
        if cured
        else "Look at the kernels and at the known issues; precision and fusion are not to blame."
    )
    return Finding(
        id="fusion",
        kind="engine-defect",
        severity="error" if cured else "note",
        title=title,
        evidence=evidence,
        mend=Mend(text=text),
    )


def _size(gap: float) -> float:
    """A gap that is not a number is the worst."""
    return math.inf if math.isnan(gap) else gap
