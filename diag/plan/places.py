"""YAML with places: a document as plain values, and the line on which each of its parts begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from diag.errors import PlanError

Place = tuple[str | int, ...]
"""Keys and list positions from the document's root, as pydantic gives them."""


@dataclass(frozen=True)
class Document:
    """Plain values of a YAML text, and the line (from 1) of every key and list item."""

    value: object
    lines: Mapping[Place, int]

    def line(self, place: Place) -> int:
        """Line of `place`, or of the innermost part around it that the text holds."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def parse_yaml(text: str, name: str) -> Document:
    """Read one YAML document, with safe types only.

    `name` says in messages where the text comes from. Raises PlanError when the text is not YAML, holds
    more than one document, repeats a key, uses an alias, or asks for a type that is not plain data.
    """
    try:
        return _parse(text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}," if mark else ""
        raise PlanError(f"{name}{line} is not valid YAML: {error.problem}", "Mend the line.") from error
    except RecursionError as error:
        raise PlanError(f"{name} is nested too deeply", "Give the path of a YAML plan.") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PlanError(f"{name} is not valid YAML: {what}", "Give the path of a YAML plan.") from error


def _parse(text: str, name: str) -> Document:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(None, {})
        lines = _Lines(name)
        lines.collect(root, ())
        return Document(loader.construct_document(root), lines.found)
    finally:
        loader.dispose()


class _Lines:
    """Notes the line of each part. Refuses repeated keys, which YAML readers resolve in silence, and
    aliases, which can make a short text endless."""

    def __init__(self, name: str) -> None:
        self.found: dict[Place, int] = {}
        self._name = name
        self._nodes: set[int] = set()

    def collect(self, node: yaml.Node, place: Place) -> None:
        line = node.start_mark.line + 1
        self.found.setdefault(place, line)
        if id(node) in self._nodes:
            raise PlanError(
                f"{self._name}, line {self.found[place]}: YAML aliases are not read", "Write the value out."
            )
        self._nodes.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, place)
        elif isinstance(node, yaml.SequenceNode):
            for position, item in enumerate(node.value):
                self.collect(item, (*place, position))

    def _mapping(self, node: yaml.MappingNode, place: Place) -> None:
        for key, value in node.value:
            inner, line = (*place, str(key.value)), key.start_mark.line + 1
            if inner in self.found:
                raise PlanError(
                    f"{self._name}, line {line}: key {str(key.value)!r} is given twice",
                    "Keep one of the two.",
                )
            self.found[inner] = line
            self.collect(value, inner)
