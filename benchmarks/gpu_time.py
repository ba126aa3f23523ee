"""How a part of the GPU suite says that its time is up."""

from __future__ import annotations


class OutOfTime(Exception):  # noqa: N818 - it is no error
    """The time is up before a part could begin."""
