"""What an interrupted calibration has counted so far, in a file of its own."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from diag.calibration.measurement import Measurement, measurement_of, table_of
from diag.calibration.table import CalibrationTable
from diag.errors import TableError
from diag.files import write_text

_SAVE_SHARE = 0.02
"""Share of the time that may go into keeping what is done."""


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: str
    done: list[int]
    table: CalibrationTable


@dataclass
class Checkpoint:
    """Where a run keeps what it has, and which run it is. Sums add up in any order, so gaps do no harm."""

    path: Path
    key: str
    _due: float = field(default=0.0, init=False)

    def load(self) -> tuple[Measurement, set[int]] | None:
        """What `save` kept of this run, and the numbers of the batches in it; None when there is nothing."""
        try:
            kept = _Kept.model_validate_json(self.path.read_bytes())
            if kept.key != self.key:
                return None
            return measurement_of(kept.table), set(kept.done)
        except (OSError, ValidationError, TableError):
            return None

    def save(self, found: Measurement, done: set[int], at_once: bool = False) -> None:
        """Keep it; unless `at_once`, only when that was not done a moment ago."""
        began = time.monotonic()
        if began < self._due and not at_once:
            return
        table = table_of(found, "", "minmax", costed=False).model_dump(by_alias=True)
        kept = {"key": self.key, "done": sorted(done), "table": table}
        write_text(json.dumps(kept, allow_nan=False), self.path)
        ended = time.monotonic()
        self._due = ended + (ended - began) / _SAVE_SHARE

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
