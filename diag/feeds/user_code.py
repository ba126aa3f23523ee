"""Functions in Python files that the user named: loaded, called, and blamed by line when they raise."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diag.errors import DataError


def load_function(file: Path, name: str, hint: str) -> Callable[..., Any]:
    """The function `name` that `file` defines. Runs the file.

    Raises DataError, with `hint` when the file defines no such function.
    """
    spec = importlib.util.spec_from_file_location(f"trtdiag_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(f"{str(file)!r} is not a Python file", "Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script that it runs
    try:
        with blamed(file):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"{str(file)!r} defines no function {name}()", hint)
    return function  # type: ignore[no-any-return]


@contextmanager
def blamed(file: Path) -> Iterator[None]:
    """Turn whatever the user's code raises into a DataError that names its line."""
    try:
        yield
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        line = _line_in(file, error)
        place = f"{str(file)!r}, line {line}" if line else repr(str(file))
        raise DataError(f"{place}: {type(error).__name__}: {error}", "Correct the script.") from error


def _line_in(file: Path, error: BaseException) -> int:
    """Line of `file` nearest to where `error` was raised, 0 when it was raised elsewhere."""
    here = (str(file), str(file.absolute()))  # Python loads a file by its absolute path
    if isinstance(error, SyntaxError) and error.filename in here:
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename in here), 0)
