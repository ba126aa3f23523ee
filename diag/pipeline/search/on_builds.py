"""What a search on real builds found, in words: the sets built, what each gave, how far it is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diag.pipeline.search.outcome import OWN, Metrics
from diag.search.builds import BuildSearch
from diag.search.target import Bound


@dataclass(frozen=True)
class BuildTrial:
    """One set of pins, built and run."""

    pins: tuple[str, ...]
    format: str
    values: str
    """The target's metrics on the engine, in words; or why there are none."""
    met: bool


@dataclass(frozen=True)
class OnBuilds:
    """A search on builds, after the emulation's."""

    engine: str
    found: BuildSearch
    format: str
    emulated: tuple[str, ...]
    """Pins with which the emulation holds the target."""
    trials: tuple[BuildTrial, ...]
    groups: int
    metrics: Metrics
    """Of the plan in the end, on the engine."""
    too_dear: bool = False
    """The set found is over the ceiling, and not taken."""

    @property
    def met(self) -> bool:
        """Whether the plan in the end holds the target on the engine."""
        return self.found.outcome != "impossible" and not self.too_dear

    @property
    def repaired(self) -> bool:
        """Whether the pins are others than the emulation's."""
        return self.found.outcome == "repaired" and not self.too_dear

    @property
    def remark(self) -> str:
        """What the verdict says of it; empty where the first build held."""
        if self.found.outcome == "held":
            return ""
        asked = "no pins, as emulated"
        if self.emulated:
            asked = f"the {pins_text(self.emulated)} of the emulation in {self.trials[0].format.upper()}"
        if self.repaired:
            return f" on {self.engine}, found on builds: with {asked} it misses there"
        if self.too_dear:
            count = pins_text(self.found.pins)
            return f", but not on {self.engine}: there it needs {count}, more than the ceiling allows"
        return f", but not on {self.engine}: it misses there with {asked}{self._all}"

    @property
    def _all(self) -> str:
        return " and with every candidate raised" if len(self.trials) > 1 else ""

    @property
    def proof(self) -> str:
        """How far the set is proven on builds."""
        built = f"{_builds(self.found.builds)} on {self.engine}"
        if self.found.outcome == "held":
            asked = "; whether a pin can go was asked of the emulation alone" if self.emulated else ""
            return f"Verified on the engine with {built}{asked}."
        if not self.repaired:
            return f"Not verified on the engine, after {built}."
        if self.found.minimal:
            return f"1-minimal on builds: taking any pin away misses the target ({built})."
        limit = (
            f"{self.found.limit} are the limit for {pins_text(self.found.pins)} among {self.groups} groups"
        )
        return f"Verified on builds, not proven minimal ({built}; {limit})."

    def without(self, pin: str) -> str:
        """What a pin of the set found buys on the engine."""
        rest = set(self.found.pins) - {pin}
        said = (
            f"without it {t.values}, which misses" for t in self.trials if set(t.pins) == rest and not t.met
        )
        origin = "" if pin in self.emulated else "not one of the pins of the emulation; "
        return origin + next(said, "not built without it")

    @property
    def notes(self) -> list[str]:
        """A line for each build, in their order."""
        lines = [f"Build {number}: {self._line(t)}" for number, t in enumerate(self.trials, start=1)]
        if self.found.builds > len(self.trials):
            lines.append(
                f"Beside these {_builds(self.found.builds - len(self.trials))} to listen to its tensors."
            )
        return lines

    def _line(self, trial: BuildTrial) -> str:
        words = pins_text(trial.pins) + (f" in {trial.format.upper()}" if trial.pins else "")
        gone = set(self.found.pins) - set(trial.pins)
        if self.repaired and len(gone) == 1 and set(trial.pins) < set(self.found.pins):
            words += f", those found without {gone.pop()}"
        return f"{words}: {trial.values}: {'holds' if trial.met else 'misses'}."

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "engine": self.engine,
            "outcome": self.found.outcome,
            "builds": self.found.builds,
            "limit": self.found.limit,
            "groups": self.groups,
            "minimal": self.found.minimal,
            "pins": list(self.found.pins),
            "format": self.format,
            "emulated_pins": list(self.emulated),
            "over_ceiling": self.too_dear,
            "trials": [asdict(trial) for trial in self.trials],
        }


def values_of(metrics: Metrics, bounds: Sequence[Bound]) -> str:
    """The metrics that a target names, by output."""
    found = [
        f"{'' if name == OWN else f'{name} '}{bound.metric} {values[bound.metric]:.5g}{_lost(values)}"
        for bound in bounds
        for name, values in metrics.items()
        if bound.metric in values and bound.output in (None, name)
    ]
    return ", ".join(dict.fromkeys(found))


def _lost(values: dict[str, float]) -> str:
    lost = values.get("nonfinite", 0)
    return f" ({lost:.0f} values not finite)" if lost else ""


def pins_text(pins: Sequence[str]) -> str:
    """`no pins`, `1 pin`, `2 pins`."""
    return "1 pin" if len(pins) == 1 else f"{len(pins) or 'no'} pins"


def _builds(count: int) -> str:
    return "1 build" if count == 1 else f"{count} builds"
