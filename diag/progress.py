"""How long work tells the caller where it is. The command line draws it; a library user may ignore it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the steps of long work."""

    def start(self, stage: str, total: int | None) -> None:
        """A stage begins; `total` is its number of steps, None when it cannot be known."""

    def advance(self, steps: int = 1) -> None:
        """So many steps of the current stage are done."""

    def note(self, text: str) -> None:
        """Something the user should know now (a fallback, a resumed run)."""


class Silent:
    """Progress that goes nowhere."""

    def start(self, stage: str, total: int | None) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass
