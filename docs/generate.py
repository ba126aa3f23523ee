"""Writes the generated pages of this folder: the JSON Schemas of files, and `reference.md`.

Run `python docs/generate.py` after a change of commands, options, metrics, finding kinds, or of the classes
behind reports, plans and calibration tables; a test fails while a page is old.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

from diag.calibration import table
from diag.cli.main import app
from diag.drift import stats_file
from diag.drift.stats import SCHEMA as STATS_SCHEMA
from diag.errors import EngineError, NotEnoughEvidenceError, OutputError, TrtdiagError
from diag.files import write_text
from diag.numerics.table import DRIFT_METRICS, METRICS
from diag.plan import schema as plan
from diag.report import schema as report
from diag.resources import data_dir

DOCS = Path(__file__).parent
REPORT_SCHEMA = DOCS / "report.schema.json"

_BETTER = {
    "higher": "higher is better",
    "lower": "lower is better",
    "zero": "0 is best",
    "none": "informative",
}


def report_schema() -> str:
    """The JSON Schema of `report.json`, as text."""
    return _schema(report.Report, report.SCHEMA)


def plan_schema() -> str:
    """The JSON Schema of a plan, as text."""
    return _schema(plan.Plan, plan.SCHEMA)


def calibration_schema() -> str:
    """The JSON Schema of a calibration table, as text."""
    return _schema(table.CalibrationTable, table.SCHEMA)


def stats_schema() -> str:
    """The JSON Schema of the header of a file of statistics, as text."""
    return _schema(stats_file.StatsHeader, STATS_SCHEMA)


def reference() -> str:
    """Commands, options, exit codes, metrics and finding kinds, as Markdown."""
    parts = (_commands(), _exit_codes(), _metrics(), _finding_kinds())
    return "\n".join(line for part in parts for line in part)


PAGES: Mapping[str, Callable[[], str]] = {
    "report.schema.json": report_schema,
    "plan.schema.json": plan_schema,
    "calibration.schema.json": calibration_schema,
    "stats.schema.json": stats_schema,
    "reference.md": reference,
}
"""Every generated page, by the name of its file."""


def _schema(part: type[BaseModel], title: str) -> str:
    body = part.model_json_schema(by_alias=True, mode="validation")
    # The class fills `schema` in by itself, but a file that lacks it is refused.
    body["required"] = list(dict.fromkeys(["schema", *body["required"]]))
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": title}
    return json.dumps(schema, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _commands() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Made by `python docs/generate.py`; do not edit."
    yield ""
    yield "## Commands"
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        yield ""
        yield f"### trtdiag {name}"
        yield ""
        yield str(command.help)
        yield ""
        example = str(command.epilog).removeprefix("Example: ")
        yield from (f"    {line}" for line in example.split("; "))
        yield ""
        yield "| option | meaning |"
        yield "|---|---|"
        for parameter in command.params:
            if parameter.name != "help":
                yield f"| {_names(parameter)} | {_cell(_meaning(parameter))} |"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    value = "" if parameter.is_flag else f" {parameter.metavar or 'N'}"
    names = "/".join((*parameter.opts, *parameter.secondary_opts))
    return f"`{names}{value}`"


def _meaning(parameter: Any) -> str:
    text = str(parameter.help or "").strip()
    if parameter.required:
        return f"{text} Required." if parameter.param_type_name == "option" else text
    default = parameter.default
    if isinstance(default, bool):
        return f"{text} Default: {'on' if default else 'off'}." if parameter.secondary_opts else text
    return text if default in (None, "", [], ()) else f"{text} Default: {default}."


def _exit_codes() -> Iterator[str]:
    codes = {
        0: "The command did its work.",
        1: "Something that was asked for was missed: `--fail-under`, `--strict`, a target, `gate`.",
        TrtdiagError.exit_code: "A usage or input error: options, model, data, plan, table, report.",
        OutputError.exit_code: "A tool or engine failed, or results cannot be written.",
        NotEnoughEvidenceError.exit_code: "Not enough evidence to decide.",
        130: "Interrupted.",
    }
    assert EngineError.exit_code == OutputError.exit_code
    yield from ("", "## Exit codes", "", "| code | meaning |", "|---|---|")
    yield from (f"| {code} | {meaning} |" for code, meaning in codes.items())
    yield from ("", 'With `--json` an error is `{"error": {"problem", "hint", "exit_code"}}`.')


def _metrics() -> Iterator[str]:
    yield from ("", "## Metrics", "", "| metric | unit | better | meaning |", "|---|---|---|---|")
    for metric in (*METRICS.values(), *DRIFT_METRICS.values()):
        yield f"| `{metric.name}` | {metric.unit} | {_BETTER[metric.better]} | {_cell(metric.meaning)} |"


def _finding_kinds() -> Iterator[str]:
    kinds = yaml.safe_load((data_dir("rules") / "finding_kinds.yaml").read_text(encoding="utf-8"))
    yield from ("", "## Kinds of findings", "", "| kind | meaning |", "|---|---|")
    yield from (f"| `{kind}` | {_cell(meaning)} |" for kind, meaning in kinds.items())
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    for name, made in PAGES.items():
        write_text(made(), DOCS / name)
