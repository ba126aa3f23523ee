"""Finds the data folders (`rules`, `reports`) in a wheel, an editable install and a checkout; reads rules."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict


class Rules(BaseModel):
    """A file of `rules`, or a part of one: every key is known, nothing changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Contents = TypeVar("Contents", bound=Rules)


def data_dir(name: str) -> Path:
    """Folder of package data called `name`.

    Raises FileNotFoundError when neither the wheel's copy nor the checkout's folder exists.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"trtdiag's data folder {name!r} is missing: the installation is incomplete.")


def read_rules(file: str, contents: type[Contents]) -> Contents:
    """The file of `rules` that ships with this release, checked."""
    text = (data_dir("rules") / file).read_text(encoding="utf-8")
    return contents.model_validate(yaml.safe_load(text))
