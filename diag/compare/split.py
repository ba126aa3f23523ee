"""Whose error is it: the number format's, the engine's, TF32's, the marks', the batch's, or nobody's.

Pure functions of measured gaps. A gap is a relative L2: norm of the difference over norm of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from diag.compare.selfcheck import SelfCheck
from diag.resources import Rules, read_rules

Kind = Literal[
    "agreement",
    "format",
    "engine-defect",
    "tf32-default",
    "observer-effect",
    "batch-or-shape",
    "nondeterministic",
    "unclear",
]


class EngineRules(Rules):
    """Contents of rules/engine.yaml."""

    good_rel_l2: float
    fp32_rel_l2: float
    tf32_ratio: float
    format_ratio: float
    own_ratio: float
    defect_ratio: float
    noise_ratio: float
    observer_ratio: float
    row_roundoffs: float
    row_floor_rel_l2: float
    row_format_share: float

    def row_tolerance(self, unit_roundoff: float, format_gap: float = 0.0) -> float:
        """What rows of one batch may differ by, and still agree (relative L2).

        `unit_roundoff` is the widest of the formats in use, `format_gap` the emulated error of the plan: one
        that lost its values altogether (infinite) counts as 1.
        """
        by_rounding = min(max(self.row_roundoffs * unit_roundoff, self.row_floor_rel_l2), self.good_rel_l2)
        return max(by_rounding, self.row_format_share * min(format_gap, 1.0))


@cache
def engine_rules() -> EngineRules:
    """The rules that ship with this release."""
    return read_rules("engine.yaml", EngineRules)


@dataclass(frozen=True, slots=True)
class Gaps:
    """What was measured of one output. None: not measured. Infinite where values are not finite."""

    format_gap: float
    """Emulation against reference."""
    engine_gap: float
    """Engine against emulation."""
    total_gap: float
    """Engine against reference."""
    noise_gap: float = 0.0
    """A rebuild without a timing cache against the engine, or the same call twice; 0 where not measured."""
    tf32: bool = False
    """Whether the engine may multiply in TF32."""
    tf32_gap: float | None = None
    """The model emulated in TF32 against the reference."""
    marked_gap: float | None = None
    """The build with marked tensors against the shipped one."""
    lowered: bool = True
    """Whether the plan lowers anything: false for an FP32 engine."""


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and the numbers that say so."""

    kind: Kind
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("agreement", "tf32-default")


def split(gaps: Gaps, checks: Sequence[SelfCheck] = (), rules: EngineRules | None = None) -> Verdict:
    """The verdict on one output, in the order in which one finding voids the next.

    An engine that contradicts itself is faulty whatever its precision; an FP32 engine is judged without any
    theory of formats; then the format is asked whether it explains the error.
    """
    rules = rules or engine_rules()
    return _contradiction(checks) or (_lowered(gaps, rules) if gaps.lowered else _fp32(gaps, rules))


def observer_verdict(gaps: Gaps, rules: EngineRules | None = None) -> Verdict | None:
    """Whether marking tensors changes the outputs beyond the noise; None where no marked build was run."""
    rules = rules or engine_rules()
    if gaps.marked_gap is None:
        return None
    bound = rules.observer_ratio * gaps.noise_gap
    numbers = {"marked_rel_l2": gaps.marked_gap, "noise_rel_l2": gaps.noise_gap}
    if gaps.marked_gap > bound:
        text = (
            f"the build with marked tensors moves the output by {gaps.marked_gap:.2g} (relative L2), a "
            f"rebuild by {gaps.noise_gap:.2g}: the marks change the result, blame no layer by them"
        )
        return Verdict("observer-effect", text, numbers)
    return Verdict(
        "agreement",
        f"the marked build moves the output by {gaps.marked_gap:.2g}, no more than a rebuild does "
        f"({gaps.noise_gap:.2g})",
        numbers,
    )


def _contradiction(checks: Sequence[SelfCheck]) -> Verdict | None:
    proofs = [check for check in checks if check.status == "contradiction"]
    if not proofs:
        return None
    # What differs between two equal calls cannot be told from what differs between rows.
    worst = max(proofs, key=lambda check: (check.test == "same_call", check.rel_l2))
    kind: Kind = "nondeterministic" if worst.test == "same_call" else "batch-or-shape"
    numbers = {f"{c.test}_rel_l2": c.rel_l2 for c in proofs} | {"tolerance_rel_l2": worst.tolerance_rel_l2}
    return Verdict(kind, f"the engine contradicts itself: {worst.text}", numbers)


def _fp32(gaps: Gaps, rules: EngineRules) -> Verdict:
    numbers = _numbers(gaps)
    floor = max(rules.fp32_rel_l2, rules.noise_ratio * gaps.noise_gap)
    size = f"the FP32 engine differs from the reference by {gaps.total_gap:.2g} (relative L2)"
    if gaps.tf32 and gaps.tf32_gap is not None and gaps.tf32_gap > 0:
        numbers["tf32_ratio"] = ratio = gaps.total_gap / gaps.tf32_gap
        if 1 / rules.tf32_ratio <= ratio <= rules.tf32_ratio:
            text = f"{size}, its emulation in TF32 by {gaps.tf32_gap:.2g}: TF32 explains it, no defect"
            return Verdict("tf32-default", text, numbers)
        floor = max(floor, rules.tf32_ratio * gaps.tf32_gap)
    if gaps.total_gap <= floor:
        return Verdict("agreement", f"{size}: they agree", numbers)
    if gaps.tf32 and gaps.tf32_gap is None:
        return Verdict("unclear", f"{size}; TF32 is on: build it without, or emulate TF32, to tell", numbers)
    text = f"{size}, more than {floor:.2g}: no number format explains it, so advice on precision is pointless"
    return Verdict("engine-defect", text, numbers)


def _lowered(gaps: Gaps, rules: EngineRules) -> Verdict:
    numbers = _numbers(gaps)
    ratio = numbers["engine_over_emulated"] = _ratio(gaps.total_gap, gaps.format_gap)
    sizes = f"error of the engine {gaps.total_gap:.2g}, of the emulated format {gaps.format_gap:.2g}"
    floor = max(rules.fp32_rel_l2, rules.noise_ratio * gaps.noise_gap)
    if gaps.tf32 and gaps.tf32_gap is not None:
        floor = max(floor, rules.tf32_ratio * gaps.tf32_gap)
    if ratio >= rules.defect_ratio and gaps.total_gap > floor:
        text = f"{sizes} (relative L2): {_times(ratio)} what the format costs, so the engine is to blame"
        return Verdict("engine-defect", text, numbers)
    if gaps.total_gap <= rules.good_rel_l2:
        text = f"{sizes} (relative L2): the engine is good"
        if gaps.format_gap > rules.good_rel_l2:
            text = f"{sizes} (relative L2): the engine is better than the format allows; was it built so?"
        return Verdict("agreement", text, numbers)
    if ratio <= rules.format_ratio and gaps.engine_gap > rules.own_ratio * gaps.format_gap:
        text = (
            f"{sizes} (relative L2): of that size, but the engine is {gaps.engine_gap:.2g} from its own "
            f"emulation, so the format explains only a part"
        )
        return Verdict("unclear", text, numbers)
    if ratio <= rules.format_ratio:
        return Verdict("format", f"{sizes} (relative L2): the number format explains it", numbers)
    return Verdict("unclear", f"{sizes} (relative L2): between format and engine nothing is proved", numbers)


def _numbers(gaps: Gaps) -> dict[str, float]:
    numbers = {
        "format_rel_l2": gaps.format_gap,
        "engine_rel_l2": gaps.engine_gap,
        "total_rel_l2": gaps.total_gap,
        "noise_rel_l2": gaps.noise_gap,
    }
    if gaps.tf32_gap is not None:
        numbers["tf32_rel_l2"] = gaps.tf32_gap
    return numbers


def _ratio(engine: float, emulated: float) -> float:
    """Engine's error over the format's; 1 where both lost their values (infinite), or neither has any."""
    if math.isinf(emulated) or engine == emulated:
        return 1.0 if math.isinf(engine) or engine == emulated else 0.0
    return engine / emulated if emulated > 0 else math.inf


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if math.isfinite(ratio) else "beyond"
