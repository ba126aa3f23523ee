"""`ranking.json`: what `rank` measured, as a file that the user may edit and hand back to `pin`.

A row switched off (`"enabled": false`) stays lowered; a row whose layers were changed or written anew is a
group to be measured. The file is keyed with weights, plan, table and data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diag.errors import UsageError
from diag.files import write_text
from diag.model.graph import Model
from diag.roles import Role
from diag.search.rank import Candidate, Effect, Ranking

SCHEMA = "trtdiag.ranking/1"
_AGAIN = "Make one with trtdiag rank, with the same model, plan, table and data."


class Row(BaseModel):
    """One group of layers, and the damages that were measured of it (null: not finite)."""

    model_config = ConfigDict(extra="ignore")

    layers: list[str] = Field(min_length=1)
    enabled: bool = True
    kind: str = "layer"
    role: str = ""
    block: int | None = None
    lowered: list[float | None] = []
    """Damage of each batch with only these layers lowered."""
    raised: list[float | None] = []
    """Damage that raising only these layers removes, of each batch."""
    measured: str = ""
    """Identity of the layers and numbers: a row that was edited does not match it."""

    @property
    def intact(self) -> bool:
        return bool(self.lowered) and self.measured == self.digest()

    def digest(self) -> str:
        text = json.dumps([self.layers, self.lowered, self.raised])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class RankingFile(BaseModel):
    """The file, read."""

    model_config = ConfigDict(extra="ignore")

    schema_: Literal["trtdiag.ranking/1"] = Field(alias="schema")
    key: str
    target: str = ""
    totals: list[float | None] = []
    stopped: str = ""
    """Why the work ended, in words."""
    groups: list[Row] = Field(min_length=1)

    def candidates(self) -> list[Candidate]:
        """The groups that are switched on, in the file's order."""
        rows = [row for row in self.groups if row.enabled]
        return [
            Candidate(row.layers[0], frozenset(row.layers), row.kind if row.intact else "drawn")
            for row in rows
        ]

    def effects(self, target: str) -> dict[str, Effect]:
        """Effects of rows that were not edited, by candidate; none when they were for another target."""
        if target != self.target:
            return {}
        rows = [row for row in self.groups if row.enabled and row.intact]
        return {
            row.layers[0]: Effect(
                Candidate(row.layers[0], frozenset(row.layers), row.kind),
                [_number(v) for v in row.lowered],
                [_number(v) for v in row.raised],
            )
            for row in rows
        }


def write_ranking(
    path: Path, key: str, target: str, ranking: Ranking, model: Model, roles: Mapping[str, Role]
) -> None:
    """Write the ranking, worst first."""
    body = {
        "schema": SCHEMA,
        "key": key,
        "target": target,
        "total_damage": finite(ranking.total),
        "totals": [finite(value) for value in ranking.totals],
        "batches": ranking.batches,
        "settled": ranking.settled,
        "stopped": stopped_by(ranking),
        "kendall_tau": ranking.kendall_tau,
        "groups": [_row(effect, model, roles) for effect in ranking.effects],
    }
    write_text(json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False), path)


def stopped_by(ranking: Ranking) -> str:
    """Why the ranking's work ended, in words."""
    if ranking.settled:
        return "the order of what matters is settled"
    if ranking.unmeasured:
        return f"time ran out: {ranking.unmeasured} not measured within the budget"
    return "no batch or no time was left before the order of what matters settled"


def _row(effect: Effect, model: Model, roles: Mapping[str, Role]) -> dict[str, Any]:
    role = roles[effect.candidate.id]
    layers = sorted(effect.candidate.layers, key=lambda n: model.layer_by_id[n].index)
    row = Row(
        layers=layers,
        kind=effect.candidate.kind,
        lowered=[finite(v) for v in effect.lowered],
        raised=[finite(v) for v in effect.raised],
    )
    return {
        "layers": layers,
        "enabled": True,
        "kind": row.kind,
        "role": role.name,
        "block": role.block,
        "batches": len(effect.lowered),
        "lowered_damage": finite(effect.lowered_mean),
        "raised_gain": finite(effect.raised_mean),
        "relative_spread": finite(effect.spread),
        "lowered": row.lowered,
        "raised": row.raised,
        "measured": row.digest(),
    }


def rows_of(path: Path) -> dict[str, Row]:
    """The groups of a ranking that was just written, by their first layer."""
    found = RankingFile.model_validate_json(path.read_bytes())
    return {row.layers[0]: row for row in found.groups}


def read_ranking(path: str, key: str, lowered: Collection[str]) -> RankingFile:
    """Read a ranking. Raises UsageError when it is malformed, stale, or names what is not lowered."""
    try:
        found = RankingFile.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"ranking {path!r} cannot be read: {error.strerror or error}", _AGAIN) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise UsageError(f"{path!r} is no {SCHEMA} file: {first['msg']} at {place}", _AGAIN) from error
    if found.key != key:
        raise UsageError(f"ranking {path!r} was made for other weights, plan, table or data", _AGAIN)
    _check_layers(path, found.groups, lowered)
    return found


def _check_layers(path: str, rows: Sequence[Row], lowered: Collection[str]) -> None:
    if not any(row.enabled for row in rows):
        raise UsageError(f"every group of ranking {path!r} is switched off", "Leave one on.")
    seen: set[str] = set()
    for layer in (layer for row in rows for layer in row.layers):
        if layer not in lowered:
            raise UsageError(f"ranking {path!r} names {layer!r}, which the plan does not lower", "Remove it.")
        if layer in seen:
            raise UsageError(f"ranking {path!r} names {layer!r} twice", "Leave it in one group.")
        seen.add(layer)


def finite(value: float) -> float | None:
    """A number as JSON can hold it: None where it is not finite."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value
