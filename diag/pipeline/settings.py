"""What a comparison is asked for, and the rules it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from diag.gate.threshold import Threshold
from diag.resources import Rules, read_rules


@dataclass(frozen=True)
class EngineSettings:
    """What a user may choose about the engine of a comparison."""

    engine: str = "emulate"
    """`emulate` (no engine), `tensorrt`, `tensorrt-rtx`, or the path of an engine that exists."""
    shapes: tuple[str, ...] = ()
    """Profiles as `--shapes` takes them; what is not given comes from the data."""
    tf32: bool = True
    opt_level: int | None = None
    compute_capability: str | None = None
    timeout_s: float = 1800.0
    noise_floor: bool = False
    """Build once more without the timing cache: what two builds differ by."""
    fusion_off: bool = False
    """Build twice more with less fusion: whether fusion causes the engine's own error."""
    observer: bool = False
    """Build once more with every tensor marked: what marking changes."""
    table_sha256: str = ""


@dataclass(frozen=True)
class CompareSettings:
    """Options of `trtdiag compare`, in its terms. Exactly one of `plan` and `format` is given."""

    model: str
    data: str
    out: str
    plan: str | None = None
    format: str | None = None
    calibration: str | None = None
    engine: EngineSettings = EngineSettings()
    limit: int | None = None
    fail_under: tuple[Threshold, ...] = ()
    slice_mb: int = 256
    resume: bool = True
    save_typed: bool = False
    labelled: bool = False
    """Whether the data may hold arrays that are no inputs of the model."""
    command: str = "trtdiag compare"


class CompareRules(Rules):
    """Contents of rules/compare.yaml."""

    bad_sqnr_db: float
    reference_tolerance_rel_l2: float


@cache
def compare_rules() -> CompareRules:
    """The rules that ship with this release."""
    return read_rules("compare.yaml", CompareRules)


def good_from_db(fail_under: tuple[Threshold, ...]) -> float:
    """SQNR from which an output is good: the strictest that the user demands, else the rules'."""
    asked = [t.bound for t in fail_under if t.metric == "sqnr_db" and t.op in (">", ">=")]
    return max(asked, default=compare_rules().bad_sqnr_db)
