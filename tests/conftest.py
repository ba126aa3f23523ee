"""What the tests of all rooms share: a way to run the command in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from ended import Ended

from diag.cli.main import run as run_command


@pytest.fixture
def trtdiag(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the command; an exception other than its end fails the test."""

    def run(*words: object) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command([str(word) for word in words])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return Ended(int(end.value.code or 0), out, err)

    return run
