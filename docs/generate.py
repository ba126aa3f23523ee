"""Writes the generated pages of this folder: `report.schema.json` from the report's classes.

Run `python docs/generate.py` after a change of `diag/report/schema.py`; a test fails while the file is old.
"""

from __future__ import annotations

import json
from pathlib import Path

from diag.files import write_text
from diag.report.schema import SCHEMA, Report

REPORT_SCHEMA = Path(__file__).parent / "report.schema.json"


def report_schema() -> str:
    """The JSON Schema of `report.json`, as text."""
    body = Report.model_json_schema(by_alias=True, mode="validation")
    # The class fills `schema` in by itself, but a file that lacks it is refused.
    body["required"] = ["schema", *body["required"]]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": SCHEMA}
    return json.dumps(schema, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


if __name__ == "__main__":
    write_text(report_schema(), REPORT_SCHEMA)
