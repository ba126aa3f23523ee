"""Turns what validation found into one sentence that names the place, and a remedy."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trouble:
    """One finding of pydantic's: its kind, place, own message, the value, and details."""

    kind: str
    place: tuple[str | int, ...]
    message: str
    value: object
    details: Mapping[str, object] = field(default_factory=dict)


_WANTED = {
    "string_type": "Text is needed; quote it.",
    "string_too_short": "Text is needed.",
    "bool_type": "Give true or false.",
    "bool_parsing": "Give true or false.",
    "tuple_type": "A list is needed.",
    "model_type": "Keys with values are needed.",
    "model_attributes_type": "Keys with values are needed.",
}


class RefusedError(ValueError):
    """Raised inside a validator, in words that are meant for the user."""

    def __init__(self, problem: str, hint: str = "", place: tuple[str | int, ...] | None = None) -> None:
        """`place` says where the trouble is when the validator looks at more than one field."""
        super().__init__(problem)
        self.hint = hint
        self.place = place


def say(trouble: Trouble, known_keys: Sequence[str]) -> tuple[str, str]:
    """Problem and hint for a finding; `known_keys` are those allowed where it was found."""
    key = str(trouble.place[-1]) if trouble.place else "the plan"
    around = path_text(trouble.place[:-1])
    if trouble.kind == "extra_forbidden":
        problem = f"{around} has an unknown key {key!r}" if around else f"unknown key {key!r}"
        return problem, did_you_mean(key, known_keys, "Known keys")
    if trouble.kind == "invalid_key":
        return f"key {key} is not text", f"Known keys: {', '.join(known_keys)}."
    if trouble.kind == "missing":
        return f"{around} has no key {key!r}" if around else f"key {key!r} is missing", f"Add {key}."
    if trouble.kind == "value_error":
        return _own_words(trouble)
    problem = f"{path_text(trouble.place)} cannot be {shown(trouble.value)}"
    if trouble.kind == "literal_error":
        choices = _choices(str(trouble.details.get("expected", "")))
        return problem, did_you_mean(str(trouble.value), choices, "Choices")
    return problem, _WANTED.get(trouble.kind, f"{trouble.message}.")


def _own_words(trouble: Trouble) -> tuple[str, str]:
    error = trouble.details.get("error")
    pin = path_text(trouble.place[:2]) if trouble.place[:1] == ("pins",) else ""
    problem = str(error or trouble.message)
    return f"{pin}: {problem}" if pin else problem, getattr(error, "hint", "")


def path_text(place: Sequence[str | int]) -> str:
    """A place as people read it: `pin 2 format`, counted from 1, or `quantizer.method`."""
    parts = [part for part in place if isinstance(part, int) or not part.startswith("constrained-")]
    if len(parts) > 1 and parts[0] == "pins":
        return " ".join(["pin", str(int(parts[1]) + 1), *map(str, parts[2:])])
    return ".".join(map(str, parts))


def shown(value: object) -> str:
    """A value as it is quoted in a message, cut when it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(name: str, known: Iterable[str], label: str) -> str:
    """A hint that names what is nearest to `name`, or all of `known` when they are few."""
    names = list(dict.fromkeys(known))
    near = near_names(name, names)
    if near:
        return f"Did you mean {_or(near)}?"
    return f"{label}: {', '.join(names)}." if 0 < len(names) <= 40 else ""


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` names like `name`: equal but for case, or holding it, or else similar."""
    names = list(dict.fromkeys(known))
    wanted = name.casefold()
    equal = [other for other in names if other.casefold() == wanted]
    holding = [other for other in names if len(wanted) > 2 and wanted in other.casefold()]
    found = list(dict.fromkeys([*equal, *holding]))
    return found[:most] or difflib.get_close_matches(name, names, most, 0.6)


def _or(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _choices(expected: str) -> list[str]:
    """Literal values out of pydantic's "'a', 'b' or 'c'" or "1, 2 or 3"."""
    parts = [part.strip() for part in expected.replace(" or ", ", ").split(",")]
    return [str(ast.literal_eval(part)) for part in parts if part.startswith("'") or part.isdigit()]
