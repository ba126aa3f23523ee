"""Finds the data folders (`rules`, `reports`) in a wheel, an editable install and a checkout."""

from __future__ import annotations

from pathlib import Path


def data_dir(name: str) -> Path:
    """Folder of package data called `name`.

    Raises FileNotFoundError when neither the wheel's copy nor the checkout's folder exists.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"trtdiag's data folder {name!r} is missing: the installation is incomplete.")
