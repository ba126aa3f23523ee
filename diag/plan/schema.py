"""The precision plan: which layer in which format, as data. YAML in, YAML out.

Field meanings are fixed here; `Plan.model_json_schema()` is the published JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from diag.errors import PlanError
from diag.files import write_text
from diag.numerics.formats import BLOCK_FORMATS
from diag.plan.places import Document, parse_yaml
from diag.plan.sentences import RefusedError, Trouble, say

SCHEMA = "trtdiag.plan/1"

FloatFormat = Literal["fp32", "fp16", "bf16"]
Placement = Literal["inputs", "fused"]
Format = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "mxfp8", "nvfp4"]

OPERAND_FORMATS = frozenset({"tf32", "int8", "fp8"}) | BLOCK_FORMATS
"""Formats of a layer's operands only: as a default they mean Conv, ConvTranspose, MatMul and Gemm."""

QUANTIZED_FORMATS = frozenset({"int8", "fp8"}) | BLOCK_FORMATS
"""Formats that need scales."""

MAX_PLAN_CHARS = 4_000_000
"""A plan is read by people; a text longer than this is some other file."""

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class _Part(BaseModel):
    """Base of all parts: unknown keys are refused, so that a misspelt one is never silently lost."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Pin(_Part):
    """One exception to the default: what it is for, and the format it asks for.

    Several target keys together mean layers that all of them match.
    """

    match: Annotated[str, Field(min_length=1)] | None = None
    """A node's exact name; `re:` before a regular expression (searched anywhere); `glob:` before a glob."""
    role: Annotated[str, Field(min_length=1)] | None = None
    op_type: Annotated[str, Field(min_length=1)] | None = None
    block: Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^\d+(-\d+)?$")] | None = None
    """A block's number, or a range with both ends included: "0-2"."""
    format: Format
    reason: str = ""
    alone: bool = False
    """Leave the other layers of a group as they are. Without it a group moves as a whole."""

    @field_validator("block", mode="before")
    @classmethod
    def _block(cls, value: object) -> object:
        if value is None:
            return None
        found = _RANGE.fullmatch(str(value)) if isinstance(value, (int, str)) else None
        if found is None or isinstance(value, bool):
            raise RefusedError(f"block {value!r} is neither a number nor a range such as 0-2")
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise RefusedError(f"block range {value!r} ends before it begins")
        return first if first == last else f"{first}-{last}"

    @field_validator("match")
    @classmethod
    def _match(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("re:"):
            try:
                re.compile(value[3:])
            except (re.error, RecursionError, OverflowError) as error:
                raise RefusedError(f"regular expression {value[3:]!r} is invalid: {error}") from error
        return value

    @model_validator(mode="after")
    def _has_target(self) -> Self:
        if not self.target:
            raise RefusedError("no target", "Give match, role, op_type or block.")
        return self

    @property
    def target(self) -> tuple[tuple[str, str | int], ...]:
        """The target keys that are given, in a fixed order; equal for pins of equal targets."""
        given = (("match", self.match), ("role", self.role), ("op_type", self.op_type), ("block", self.block))
        return tuple((key, value) for key, value in given if value is not None)

    @property
    def exact_name(self) -> str | None:
        """The node name when `match` names a single node."""
        return None if self.match is None or self.match.startswith(("re:", "glob:")) else self.match

    @property
    def blocks(self) -> range | None:
        """Block numbers that the pin is for."""
        if self.block is None:
            return None
        first, _, last = str(self.block).partition("-")
        return range(int(first), int(last or first) + 1)

    def __str__(self) -> str:
        return " and ".join(f"{key} {value!r}" for key, value in self.target)


class Quantizer(_Part):
    """How scales are made and how finely they are cut."""

    activations: Literal["per_tensor"] = "per_tensor"
    weights: Literal["per_channel", "per_tensor"] = "per_channel"
    method: Literal["minmax", "entropy", "percentile", "mse", "best", "awq"] | None = None
    """How ranges are chosen; when it is not given, as the calibration table says. `awq` is for INT4 weights:
    scales and steps searched on the layers' outputs; ranges of activations are then as the table says."""
    block_size: Literal[32, 64, 128] | None = None
    """Weights that share one INT4 scale; when it is not given, the largest of these that divides the layer's
    reduction axis. MXFP8 has 32, NVFP4 16."""


class Constants(_Part):
    """What happens to constants that a format cannot hold."""

    out_of_range: Literal["clamp", "inf"] = "clamp"
    """TensorRT clamps weights to the largest finite value since 8.6."""


class Plan(_Part):
    """A default format and its exceptions; the last matching pin wins."""

    model_config = ConfigDict(
        populate_by_name=True, json_schema_extra={"required": ["schema", "default"], "title": "Plan"}
    )

    schema_: Literal["trtdiag.plan/1"] = Field("trtdiag.plan/1", alias="schema")
    default: Format
    base: FloatFormat = "fp32"
    """Format of what `default` or a pin does not quantize."""
    pins: tuple[Pin, ...] = ()
    quantizer: Quantizer = Quantizer()
    constants: Constants = Constants()
    placement: Placement = "inputs"
    """Where Q/DQ stand. `inputs`: before each input of a quantized layer. `fused`: behind the operators that
    TensorRT fuses in front of it; residual Adds between quantized layers and the inputs of a Concat are
    quantized alike.
    """

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        seen: dict[object, int] = {}
        for index, pin in enumerate(self.pins):
            first = seen.setdefault(pin.target, index)
            if self.pins[first].format != pin.format:
                raise RefusedError(
                    f"pins {first + 1} ({self.pins[first].format}) and {index + 1} ({pin.format}) contradict "
                    f"each other: both are for {pin}",
                    "Keep one of them.",
                    ("pins", index),
                )
        return self


def pin_for(layer: str, fmt: str, reason: str = "") -> Pin:
    """The pin of one layer by its name, whatever characters the name holds."""
    is_pattern = layer.startswith(("re:", "glob:"))
    match = f"re:^{re.escape(layer)}$" if is_pattern else layer
    return Pin.model_validate({"match": match, "format": fmt, "reason": reason})


def plan_for_format(name: str) -> Plan:
    """The plan without pins whose default is the format `name`. Raises PlanError when there is none such."""
    return plan_from_mapping({"schema": SCHEMA, "default": name}, "the requested plan")


def plan_from_mapping(values: Mapping[str, Any], name: str = "the plan") -> Plan:
    """Validate plain values; `name` is used in messages. Raises PlanError."""
    return _validate(Document(dict(values), {}), name)


def read_plan(path: str | Path) -> Plan:
    """Read the plan at `path`. Raises PlanError, with the line, when it is missing or invalid."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"plan {str(path)!r} is not UTF-8 text", "Give the path of a YAML plan.") from error
    except (OSError, ValueError) as error:
        what = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PlanError(f"plan {str(path)!r} cannot be read: {what}", "Check the path.") from error
    return plan_from_yaml(text, f"plan {str(path)!r}")


def plan_from_yaml(text: str, name: str = "the plan") -> Plan:
    """Parse YAML text; `name` is used in messages. Raises PlanError."""
    if len(text) > MAX_PLAN_CHARS:
        raise PlanError(f"{name} is {len(text):,} characters long", "Give the path of a YAML plan.")
    return _validate(parse_yaml(text, name), name)


def plan_to_yaml(plan: Plan) -> str:
    """The plan as YAML: keys in the order of the fields, one line a pin, unset targets left out."""
    values = plan.model_dump(by_alias=True, mode="json")
    values["quantizer"] = plan.quantizer.model_dump(exclude_none=True, mode="json")
    values["pins"] = [pin.model_dump(exclude_defaults=True, mode="json") for pin in plan.pins]
    text = _dump(values, allow_unicode=True)
    # PyYAML writes some line separators bare and reads them back as spaces; escaped, they survive.
    return text if yaml.safe_load(text) == values else _dump(values, allow_unicode=False)


def _dump(values: Mapping[str, Any], allow_unicode: bool) -> str:
    return str(
        yaml.safe_dump(
            values, sort_keys=False, default_flow_style=None, allow_unicode=allow_unicode, width=10_000
        )
    )


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all. Raises OutputError."""
    write_text(plan_to_yaml(plan), Path(path))


def plan_sha256(plan: Plan) -> str:
    """SHA-256 of what the plan asks for.

    Reasons and values that equal their defaults do not count: two plans of one hash type a model alike.
    """
    asked = plan.model_dump(by_alias=True, mode="json", exclude_defaults=True)
    asked.pop("pins", None)
    pins = [pin.model_dump(exclude_defaults=True, exclude={"reason"}, mode="json") for pin in plan.pins]
    canonical = json.dumps({"schema": SCHEMA, **asked, "pins": pins}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _validate(document: Document, name: str) -> Plan:
    values = document.value
    if not isinstance(values, dict):
        what = "is empty" if values is None else "is not a mapping of keys to values"
        raise PlanError(f"{name} {what}", f"Begin it with: schema: {SCHEMA}")
    if "schema" not in values:
        raise PlanError(f"{name} has no key 'schema'", f"Begin it with: schema: {SCHEMA}")
    if values["schema"] != SCHEMA:
        line = f", line {document.line(('schema',))}" if document.lines else ""
        raise PlanError(f"{name}{line}: schema {values['schema']!r} cannot be read", f"Expected {SCHEMA}.")
    try:
        return Plan.model_validate(values)
    except ValidationError as error:
        raise _plan_error(error, document, name) from error


def _plan_error(error: ValidationError, document: Document, name: str) -> PlanError:
    """One sentence for the first finding; misspelt keys come first, since they make others missing."""
    found = error.errors(include_url=False)
    first = next((f for f in found if f["type"] in ("extra_forbidden", "invalid_key")), found[0])
    details = first.get("ctx", {})
    place = getattr(details.get("error"), "place", None) or tuple(first["loc"])
    known = _PARTS.get(str(place[0]) if len(place) > 1 else "", Plan).model_fields
    keys = [field.alias or key for key, field in known.items()]
    trouble = Trouble(first["type"], tuple(first["loc"]), first["msg"], first["input"], details)
    problem, hint = say(trouble, keys)
    line = f", line {document.line(place)}" if document.lines else ""
    return PlanError(f"{name}{line}: {problem}", hint)


_PARTS: Mapping[str, type[BaseModel]] = {"pins": Pin, "quantizer": Quantizer, "constants": Constants}
