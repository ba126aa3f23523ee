"""Reads and writes `report.json`, validated both ways."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from diag.errors import ReportError
from diag.files import write_text
from diag.report.schema import SCHEMA, Report


def dumps(report: Report) -> str:
    """The report as JSON text (strict JSON: non-finite numbers are strings)."""
    return json.dumps(report.model_dump(by_alias=True), allow_nan=False, indent=1, ensure_ascii=False)


def loads(text: str, name: str) -> Report:
    """Parse and validate a report; `name` is used in messages. Raises ReportError."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ReportError(
            f"{name} is not JSON (line {error.lineno}: {error.msg})", "Was it cut off?"
        ) from error
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != SCHEMA:
        raise ReportError(
            f"{name} is not a {SCHEMA} report (schema: {found!r})", "Give a report.json of trtdiag."
        )
    try:
        return Report.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ReportError(f"{name} breaks the report schema at {place}: {first['msg']}") from error


def read_report(path: str | Path) -> Report:
    """Read the report at `path`. Raises ReportError when it is missing or invalid."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReportError(f"report {str(path)!r} cannot be read: {reason}") from error
    return loads(text, repr(str(path)))


def checked_text(report: Report, name: str) -> str:
    """The report as JSON text, validated as a reader will. Raises ReportError."""
    text = dumps(report)
    loads(text, name)
    return text


def write_report(report: Report, path: Path) -> None:
    """Validate and write; nothing partial is left behind."""
    write_text(checked_text(report, repr(str(path))), path)
