"""The command `trtdiag`: one file for each command; errors are caught here, once."""

from __future__ import annotations

import sys
from typing import Any

import typer

from diag import __version__
from diag.cli import (
    build,
    calibrate,
    check,
    compare,
    convert,
    demo,
    doctor,
    drift,
    gate,
    inspect,
    pin,
    profile,
    rank,
    report,
)
from diag.cli.console import INTERRUPTED, fail
from diag.engines.onnxruntime import own_process
from diag.errors import TrtdiagError, UsageError

app = typer.Typer(
    name="trtdiag",
    help="Precision debugging for TensorRT: where a quantized ONNX model goes wrong, and what mends it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(shown: bool) -> None:
    if shown:
        sys.stdout.write(f"trtdiag {__version__}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


for module in (
    compare,
    check,
    calibrate,
    convert,
    rank,
    pin,
    build,
    inspect,
    profile,
    drift,
    gate,
    report,
    doctor,
    demo,
):
    app.command(module.NAME, help=module.HELP, epilog=module.EXAMPLE)(module.run)


def run(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and ends the process with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words
    try:
        code = app(words, prog_name="trtdiag", standalone_mode=False)
    except TrtdiagError as error:
        code = fail(error, as_json)
    except typer.Exit as end:
        code = end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own usage errors carry one
            raise
        code = _refuse_usage(error, as_json)
    if code == INTERRUPTED:  # newer versions of typer give this code instead of raising
        kept = words[:1] in ([compare.NAME], [demo.NAME])
        also = "; batches that are done are kept, and the same command goes on behind them" if kept else ""
        sys.stderr.write(f"trtdiag: interrupted{also}\n")
    sys.exit(int(code or 0))


def _refuse_usage(error: Any, as_json: bool) -> int:
    """Say what is wrong with the words of the command line; without any, the help was shown already."""
    message = str(error.format_message())
    command = error.ctx.command_path if error.ctx is not None else "trtdiag"
    return fail(UsageError(message, f"See {command} --help."), as_json) if message else UsageError.exit_code


def main() -> None:
    """Entry point of the installed command: the process is the command's alone."""
    own_process()
    run()


if __name__ == "__main__":
    main()
