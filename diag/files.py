"""Writing files so that nothing half-written is ever left under the final name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from diag.errors import OutputError, UsageError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; when the block succeeds it takes `path`'s place.

    Raises OutputError when the disk is full or the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"{str(path)!r} cannot be written: {error.strerror or error}",
            "Check the folder and the free space.",
        ) from error
    finally:
        with suppress(OSError):  # where it could not be made, it cannot be removed
            partial.unlink()


def write_text(text: str, path: Path) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write files that belong together: none takes its place before all are whole."""
    with ExitStack() as stack:
        for path, text in texts.items():
            stack.enter_context(replacing(path)).write_text(text, encoding="utf-8")


def output_file(path: str | Path, *inputs: str | Path) -> Path:
    """Make the folder that a result goes into. Raises OutputError when the file cannot be made there.

    `inputs` are files that the result is made from: UsageError when it would replace one of them.
    """
    file = Path(path)
    if file.resolve() in (Path(given).resolve() for given in inputs):
        raise UsageError(
            f"the result would replace {str(path)!r}, which it is made from", "Name another file."
        )
    output_folder(file.parent)
    if file.is_dir():
        raise OutputError(f"{str(path)!r} is a folder", "Name a file.")
    return file


def output_folder(path: str | Path) -> Path:
    """Make the folder for results. Raises OutputError when it cannot be made or written."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".trtdiag.probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OutputError(f"output folder {str(path)!r} cannot be written: {error.strerror}") from error
    return folder
