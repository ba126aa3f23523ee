"""The calibration table: what was measured of each tensor, and the range that a quantizer takes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diag.errors import TableError
from diag.files import write_text
from diag.numerics.formats import FORMATS, symmetric_scale

SCHEMA = "trtdiag.calibration/1"


class TensorRange(BaseModel):
    """Range of one tensor. Symmetric: values beyond +-`absmax` of the chosen method are clipped."""

    model_config = ConfigDict(extra="forbid")

    absmax: float = Field(ge=0, allow_inf_nan=False)
    minimum: float = Field(allow_inf_nan=False)
    maximum: float = Field(allow_inf_nan=False)
    elements: int = Field(ge=0)


class CalibrationTable(BaseModel):
    """Ranges by tensor name, and what they were measured on."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: str = Field(SCHEMA, alias="schema", pattern="^trtdiag\\.calibration/1$")
    model_sha256: str
    data: str
    data_sha256: str
    method: str
    batches: int
    tensors: dict[str, TensorRange]

    def scales(self, fmt: str) -> dict[str, float]:
        """Step of each tensor in a quantized format, `absmax / largest code`."""
        return {
            name: float(symmetric_scale(np.array(r.absmax), FORMATS[fmt])) for name, r in self.tensors.items()
        }


def read_table(path: str | Path, model_sha256: str) -> CalibrationTable:
    """Read a table and check that it is this model's. Raises TableError."""
    name = f"calibration table {str(path)!r}"
    try:
        table = CalibrationTable.model_validate(_parse(Path(path), name))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise TableError(
            f"{name} is not a {SCHEMA} table: {first['msg']} at {place}", "Make one with trtdiag calibrate."
        ) from error
    if table.model_sha256 != model_sha256:
        raise TableError(
            f"{name} was made for another model ({table.model_sha256[:12]}..., "
            f"this one is {model_sha256[:12]}...)",
            "Make one for this model with trtdiag calibrate.",
        )
    return table


def _parse(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{name} cannot be read: {error.strerror or error}", "Check the path.") from error
    except json.JSONDecodeError as error:
        raise TableError(
            f"{name} is not JSON (line {error.lineno}: {error.msg})", "Was it cut off? Calibrate again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise TableError(f"{name} is not a JSON file", "Make one with trtdiag calibrate.") from error


def write_table(table: CalibrationTable, path: Path) -> None:
    """Write a table, whole or not at all."""
    write_text(json.dumps(table.model_dump(by_alias=True), allow_nan=False, indent=1), path)
