"""Thresholds as text: `sqnr_db>=30`, `logits:top1>=0.99`. A threshold says what must hold."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from diag.errors import UsageError
from diag.numerics.table import DRIFT_METRICS, METRICS

_KNOWN = {**METRICS, **DRIFT_METRICS}

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

# Output names may hold colons themselves ("Identity:0"), so the greedy prefix ends at the last colon.
_GRAMMAR = re.compile(
    r"\s*(?:(?P<output>.+):)?\s*(?P<metric>[A-Za-z_]\w*)\s*(?P<op>>=|<=|==|>|<)\s*(?P<bound>[^\s<>=]+)\s*",
    re.ASCII,
)
_EXAMPLE = 'Write METRIC OP NUMBER, such as "sqnr_db>=30" or "logits:top1>=0.99".'


@dataclass(frozen=True, slots=True)
class Threshold:
    """What must hold for `metric` of one output, or of every output when `output` is None."""

    metric: str
    op: str
    bound: float
    output: str | None = None

    def __str__(self) -> str:
        prefix = "" if self.output is None else f"{self.output}:"
        return f"{prefix}{self.condition}"

    @property
    def of_drift(self) -> bool:
        """Whether it speaks of a drift report's tensors instead of outputs."""
        return self.metric in DRIFT_METRICS

    @property
    def condition(self) -> str:
        """The threshold without its output."""
        return f"{self.metric}{self.op}{self.bound:.12g}"

    @property
    def by_magnitude(self) -> bool:
        """A signed metric that is best at zero: -5 must not pass `mean_error<=0.01`."""
        return self.metric in _KNOWN and _KNOWN[self.metric].better == "zero"

    @property
    def rewards_damage(self) -> bool:
        """True for `sqnr_db<30` and the like: it holds when the result is bad. Worth a warning."""
        better = _KNOWN[self.metric].better if self.metric in _KNOWN else "none"
        wrong = {"higher": "<", "lower": ">", "zero": ">"}.get(better)
        return wrong is not None and self.op.startswith(wrong)

    def holds(self, value: float | None) -> bool:
        """Whether `value` meets the bound. A missing value and NaN never do."""
        if value is None or math.isnan(value):
            return False
        return _OPERATORS[self.op](abs(value) if self.by_magnitude else value, self.bound)


def parse_threshold(text: str, own: Collection[str] = ()) -> Threshold:
    """Read one threshold; `own` are names of metrics that the user computes.

    Raises UsageError for another grammar, an unknown metric, or a bound that is no number.
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise UsageError(f"threshold {text!r} is not understood", _EXAMPLE)
    metric = match["metric"]
    if metric not in _KNOWN and metric not in own:
        raise UsageError(f"threshold {text!r} names no metric: {metric!r}", _near(metric, _KNOWN, "Metrics"))
    output = match["output"]
    return Threshold(
        metric, match["op"], _bound(text, match["bound"]), None if output is None else output.strip()
    )


def _bound(text: str, word: str) -> float:
    try:
        bound = float(word)
    except ValueError:
        raise UsageError(f"threshold {text!r} has a bound that is no number: {word!r}", _EXAMPLE) from None
    if math.isnan(bound):
        raise UsageError(f"threshold {text!r} compares with NaN, which nothing meets", _EXAMPLE)
    return bound


def require_outputs(thresholds: Iterable[Threshold], outputs: Collection[str]) -> None:
    """Refuse thresholds on outputs that do not exist, before a long run. Raises UsageError."""
    for threshold in thresholds:
        if threshold.output is not None and not threshold.of_drift and threshold.output not in outputs:
            raise UsageError(
                f"threshold {str(threshold)!r} names no output: {threshold.output!r}",
                _near(threshold.output, outputs, "Outputs"),
            )


def _near(word: str, known: Collection[str], title: str) -> str:
    """Near names first; all of them when nothing is near."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    shown = ", ".join(list(known)[:20])
    return f"{title}: {shown}{', ...' if len(known) > 20 else ''}." if known else f"{title}: none."
