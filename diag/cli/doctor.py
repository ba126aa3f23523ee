"""`trtdiag doctor`: what can be used on this machine."""

from __future__ import annotations

from dataclasses import asdict

from diag.cli import options
from diag.cli.console import Output
from diag.engines.probe import EngineStatus, probe

NAME = "doctor"
HELP = "Show which engines, versions and GPU are usable here, and the line that installs what is missing."
EXAMPLE = "Example: trtdiag doctor --json"


def run(as_json: options.Json = False, quiet: options.Quiet = False) -> int:
    found = probe()
    Output(as_json, quiet).result({"engines": [asdict(status) for status in found]}, lambda: _text(found))
    return 0


def _text(found: tuple[EngineStatus, ...]) -> str:
    """A table whose lines are never broken: they are there to be copied."""
    rows = [("engine", "usable", "version", "what works here, or what is missing and the remedy")]
    for status in found:
        name, usable, version = status.name, "yes" if status.usable else "no", status.version
        for said in filter(None, (status.can, status.missing, status.install)):
            rows.append((name, usable, version, said))
            name = usable = version = ""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows)
