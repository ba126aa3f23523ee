"""How a command ended, as tests look at it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on standard output; fails when there is more, or less."""
        value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(self.out)
        assert isinstance(value, dict)
        assert self.out[end:] == "\n"
        return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
