"""Births and findings as cards: what is shown about each, in plain text."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from diag.numerics.table import METRICS
from diag.render.cells import Fact, count, heading, metric_text, position, with_unit
from diag.report.schema import Birth, Finding, LayerInfo, PinInfo, Report

MAX_VICTIMS = 200
"""Names shown per birth; `report.json` has them all."""

_PIN_KEYS = "match|role|op_type|block"
_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PIN_PART = re.compile(rf"(?P<key>{_PIN_KEYS}) (?P<value>{_QUOTED}|\d+)")
_PIN_SHORT = re.compile(r"(?P<key>match|role|op_type|block)[:=]\s*(?P<value>.+)", re.DOTALL)
_YAML_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


@dataclass(frozen=True, slots=True)
class BirthCard:
    number: int
    anchor: str
    layer: str
    row_anchor: str
    """The layer's row in the table of layers; empty when it has none."""
    about: str
    source: str
    change: str
    where: str
    consequence: str
    reaches_output: bool
    victims: tuple[str, ...]
    victims_title: str
    victims_left_out: int


@dataclass(frozen=True, slots=True)
class FindingCard:
    anchor: str
    severity: str
    kind: str
    title: str
    layers: tuple[str, ...]
    layers_left_out: int
    evidence: tuple[Fact, ...]
    responsibility: str
    responsible: bool | None
    mend: str
    pins_yaml: str
    command: str


def birth_cards(report: Report) -> tuple[BirthCard, ...]:
    """One card per birth, in the report's order."""
    places = layer_places(report.layers)
    return tuple(_birth_card(n, birth, places) for n, birth in enumerate(report.births, start=1))


def layer_places(layers: list[LayerInfo]) -> dict[str, tuple[int, LayerInfo]]:
    """Layers by name and by id, with their number in graph order (from 1)."""
    places: dict[str, tuple[int, LayerInfo]] = {}
    for number, layer in enumerate(layers, start=1):
        places.setdefault(layer.name, (number, layer))
        places.setdefault(layer.id, (number, layer))
    return places


def _birth_card(number: int, birth: Birth, places: dict[str, tuple[int, LayerInfo]]) -> BirthCard:
    row, layer = places.get(birth.layer, (0, None))
    behind = len(birth.victims)
    reach = "The damage reaches an output." if birth.reaches_output else "The damage heals before any output."
    return BirthCard(
        number=number,
        anchor=f"birth-{number}",
        layer=birth.layer,
        row_anchor=f"L{row}" if row else "",
        about=f"{layer.role}, {layer.op_type}, {layer.format}" if layer else "",
        source=layer.source if layer else "",
        change=change(birth),
        where=position(birth.batch, birth.index),
        consequence=reach,
        reaches_output=birth.reaches_output,
        victims=tuple(birth.victims[:MAX_VICTIMS]),
        victims_title=f"{count(behind, 'layer')} behind it explained by it",
        victims_left_out=max(0, behind - MAX_VICTIMS),
    )


def change(birth: Birth) -> str:
    """The metric before and after, in words."""
    before = metric_text(birth.metric, birth.before)
    return f"{heading(birth.metric)} {before} → {with_unit(birth.metric, birth.after)}"


def finding_cards(report: Report) -> tuple[FindingCard, ...]:
    """One card per finding, in the report's order."""
    return tuple(_finding_card(n, finding) for n, finding in enumerate(report.findings, start=1))


def _finding_card(number: int, finding: Finding) -> FindingCard:
    shown = tuple(finding.layers[:MAX_VICTIMS])
    return FindingCard(
        anchor=f"finding-{number}",
        severity=finding.severity,
        kind=finding.kind,
        title=finding.title,
        layers=shown,
        layers_left_out=len(finding.layers) - len(shown),
        evidence=tuple(
            Fact(heading(key), evidence_text(key, value)) for key, value in finding.evidence.items()
        ),
        responsibility=responsibility(finding),
        responsible=finding.responsible,
        mend=finding.mend.text,
        pins_yaml=pins_yaml(finding.mend.pins),
        command=finding.mend.command,
    )


def evidence_text(key: str, value: float | str | bool) -> str:
    """A value of the evidence for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return with_unit(key, value) if key in METRICS else metric_text(key, value)


def responsibility(finding: Finding) -> str:
    """What was measured about the finding's part in the final error."""
    words = {True: "Measured: responsible.", False: "Measured: present, not responsible."}
    parts = [words[finding.responsible]] if finding.responsible is not None else []
    if finding.share_removed is not None:
        parts.append(
            f"Keeping only these layers in FP32 removes {_percent(finding.share_removed)} of the error."
        )
    if finding.share_reproduced is not None:
        share = _percent(finding.share_reproduced)
        parts.append(f"Lowering only these layers reproduces {share} of it.")
    return " ".join(parts) or "Its part in the error was not measured."


def _percent(share: float) -> str:
    # `%` formatting writes nan and inf as such.
    return f"{100 * share:.0f} %"


def pins_yaml(pins: list[PinInfo]) -> str:
    """The pins as the part of a `plan.yaml` that they are; empty without pins."""
    if not pins:
        return ""
    return "\n".join(["pins:", *(f"  - {{{_pin_fields(pin)}}}" for pin in pins)])


def _pin_fields(pin: PinInfo) -> str:
    fields = [*_pin_target(pin.target), ("format", pin.format)]
    if pin.reason:
        fields.append(("reason", pin.reason))
    return ", ".join(f"{key}: {_yaml_text(value, digits=key == 'block')}" for key, value in fields)


def _pin_target(target: str) -> list[tuple[str, str]]:
    """A pin's target as keys of the plan: `role 'norm' and block 3`, `role:norm`, or a node's name."""
    parts = list(_PIN_PART.finditer(target))
    if parts and " and ".join(part.group() for part in parts) == target:
        return [(part["key"], str(ast.literal_eval(part["value"]))) for part in parts]
    short = _PIN_SHORT.fullmatch(target)
    return [(short["key"], short["value"])] if short else [("match", target)]


def _yaml_text(text: str, digits: bool) -> str:
    """A YAML scalar: bare when nothing can go wrong, else double-quoted (JSON strings are YAML)."""
    bare = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text) and text.lower() not in _YAML_WORDS
    number = digits and re.fullmatch(r"\d+", text)
    return text if bare or number else json.dumps(text, ensure_ascii=False)
