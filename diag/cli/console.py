"""How commands speak: progress on standard error, results on standard output, errors in one sentence."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Drawn

from diag.errors import OutputError, TrtdiagError
from diag.progress import Progress, Silent
from diag.report.schema import Report

T = TypeVar("T")

INTERRUPTED = 130
TEXT_WIDTH = 100


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["trtdiag", *sys.argv[1:]])


def exit_code(report: Report) -> int:
    """1 when a gate was asked for and missed."""
    return 1 if report.gate is not None and not report.gate.passed else 0


class Bar:
    """Progress drawn on standard error, one line for the current stage, with the time left."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._progress = Drawn(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task: Any = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, stage: str, total: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(escape(stage), total=total)
        if not self.console.is_terminal:
            self.note(stage)

    def advance(self, steps: int = 1) -> None:
        if self._task is not None:
            self._progress.advance(self._task, steps)

    def note(self, text: str) -> None:
        self.console.print(f"trtdiag: {text}", markup=False, emoji=False, soft_wrap=True)


def with_bar(silent: bool, work: Callable[[Progress], T]) -> T:
    """Do long work, its progress drawn unless `silent`."""
    if silent:
        return work(Silent())
    with Bar() as bar:
        return work(bar)


@dataclass
class Output:
    """Where a command's results go: one JSON object, a text for people, or nothing."""

    as_json: bool = False
    quiet: bool = False

    def result(self, value: Any, text: Callable[[], RenderableType]) -> None:
        """Print `value` as JSON with --json; else `text()`, unless --quiet. Raises OutputError."""
        with _to_stdout():
            if self.as_json:
                sys.stdout.write(json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n")
            elif not self.quiet:
                # Names and paths may hold brackets, which are no markup here, and must stay on one line.
                shown = text()
                stdout_console().print(shown, markup=False, emoji=False, soft_wrap=isinstance(shown, str))


@contextmanager
def _to_stdout() -> Iterator[None]:
    """A reader that has gone away (`| head`) is no error; a full disk is."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes at its end
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def stdout_console() -> Console:
    """The terminal, or text of a fixed width where the output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=TEXT_WIDTH)


def fail(error: TrtdiagError, as_json: bool) -> int:
    """Say what went wrong; the exit code to end with."""
    if as_json:
        body = {"error": {"problem": error.problem, "hint": error.hint, "exit_code": error.exit_code}}
        with suppress(OutputError), _to_stdout():
            sys.stdout.write(json.dumps(body, ensure_ascii=False) + "\n")
    sys.stderr.write(f"trtdiag: error: {error}\n")
    return error.exit_code
