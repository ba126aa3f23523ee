"""`trtdiag doctor`: what can be used on this machine."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from diag.cli import options
from diag.cli.console import Output
from diag.engines.probe import EngineStatus, probe

NAME = "doctor"
HELP = "Show which engines, versions and GPU are usable here, and the line that installs what is missing."
EXAMPLE = "Example: trtdiag doctor --json"


def run(as_json: options.Json = False, quiet: options.Quiet = False) -> int:
    found = probe()
    Output(as_json, quiet).result({"engines": [asdict(status) for status in found]}, lambda: _table(found))
    return 0


def _table(found: tuple[EngineStatus, ...]) -> Table:
    table = Table(
        "engine", "usable", "version", "what works here", "what is missing, and the remedy", box=None
    )
    for status in found:
        missing = "\n".join(part for part in (status.missing, status.install) if part)
        table.add_row(status.name, "yes" if status.usable else "no", status.version, status.can, missing)
    return table
