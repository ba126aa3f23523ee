"""The calibration table: what was measured of each tensor, and the range that a quantizer takes from it."""

from __future__ import annotations

import json
from pathlib import Path

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
    try:
        table = CalibrationTable.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TableError(f"calibration table {str(path)!r} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise TableError(f"{str(path)!r} is not a {SCHEMA} table: {first['msg']} at {place}") from error
    if table.model_sha256 != model_sha256:
        raise TableError(
            f"calibration table {str(path)!r} was made for another model "
            f"({table.model_sha256[:12]}..., this one is {model_sha256[:12]}...)",
            "Calibrate this model.",
        )
    return table


def write_table(table: CalibrationTable, path: Path) -> None:
    """Write a table, whole or not at all."""
    write_text(json.dumps(table.model_dump(by_alias=True), allow_nan=False, indent=1), path)
