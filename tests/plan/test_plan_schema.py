"""The plan as text: what is read, what is refused and in which words, and that writing loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.errors import OutputError, PlanError
from diag.plan.schema import (
    Pin,
    Plan,
    plan_for_format,
    plan_from_mapping,
    plan_from_yaml,
    plan_sha256,
    plan_to_yaml,
    read_plan,
    write_plan,
)

HEAD = "schema: trtdiag.plan/1\ndefault: int8\n"

DESIGN = HEAD + (
    "pins:\n"
    '  - {match: "/layers.3/attn/pv/MatMul", format: fp16, reason: "measured: ..."}\n'
    "  - {role: attn_softmax, format: fp16}\n"
    "  - {op_type: LayerNormalization, format: fp32}\n"
    '  - {match: "re:^/encoder/layer\\\\.[0-2]/ffn", format: bf16}\n'
    "quantizer: {activations: per_tensor, weights: per_channel, method: entropy}\n"
)


def test_the_documented_example_is_read() -> None:
    plan = plan_from_yaml(DESIGN)
    assert (plan.default, plan.base, plan.quantizer.method) == ("int8", "fp32", "entropy")
    assert [pin.format for pin in plan.pins] == ["fp16", "fp16", "fp32", "bf16"]
    assert plan.pins[0].exact_name == "/layers.3/attn/pv/MatMul"
    assert plan.pins[0].reason == "measured: ..."
    assert plan.pins[3].match == r"re:^/encoder/layer\.[0-2]/ffn"
    assert plan.pins[3].exact_name is None


def test_defaults_are_those_that_are_documented() -> None:
    plan = plan_from_yaml(HEAD)
    assert plan == Plan(default="int8")
    assert (plan.base, plan.pins, plan.placement) == ("fp32", (), "inputs")
    assert (plan.quantizer.activations, plan.quantizer.weights) == ("per_tensor", "per_channel")
    assert (plan.quantizer.method, plan.constants.out_of_range) == (None, "clamp")


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "mxfp8", "nvfp4"])
def test_a_plan_for_each_format(name: str) -> None:
    assert plan_for_format(name) == plan_from_yaml(f"schema: trtdiag.plan/1\ndefault: {name}\n")


@pytest.mark.parametrize(
    ("block", "numbers"), [("3", [3]), ("'3'", [3]), ("0-2", [0, 1, 2]), ("4-4", [4]), ("0", [0])]
)
def test_blocks_are_a_number_or_a_range(block: str, numbers: list[int]) -> None:
    pin = plan_from_yaml(HEAD + f"pins: [{{block: {block}, format: fp16}}]\n").pins[0]
    assert list(pin.blocks or ()) == numbers


def test_equal_blocks_have_equal_targets() -> None:
    values = {"format": "fp16", "role": "norm"}
    targets = {Pin.model_validate({**values, "block": block}).target for block in (4, "4", "4-4", "04")}
    assert targets == {(("role", "norm"), ("block", 4))}


REFUSED = [
    ("", "the plan is empty. Begin it with: schema: trtdiag.plan/1"),
    ("# nothing\n", "the plan is empty. Begin it with: schema: trtdiag.plan/1"),
    (
        "- int8\n",
        "the plan is not a mapping of keys to values. Begin it with: schema: trtdiag.plan/1",
    ),
    ("default: int8\n", "the plan has no key 'schema'. Begin it with: schema: trtdiag.plan/1"),
    (
        "# mine\nschema: trtdiag.plan/2\n",
        "the plan, line 2: schema 'trtdiag.plan/2' cannot be read. Expected trtdiag.plan/1.",
    ),
    ("schema: trtdiag.plan/1\n", "the plan, line 1: key 'default' is missing. Add default."),
    (
        "schema: trtdiag.plan/1\ndefault: fp61\n",
        "the plan, line 2: default cannot be 'fp61'. Did you mean 'fp16'?",
    ),
    (
        "schema: trtdiag.plan/1\ndefault: 8\n",
        "the plan, line 2: default cannot be 8. "
        "Choices: fp32, tf32, fp16, bf16, int8, fp8, int4, mxfp8, nvfp4.",
    ),
    (
        "schema: trtdiag.plan/1\ndefualt: int8\n",
        "the plan, line 2: unknown key 'defualt'. Did you mean 'default'?",
    ),
    (
        HEAD + "threads: 3\n",
        "the plan, line 3: unknown key 'threads'. Known keys: schema, default, base, pins, quantizer, "
        "constants, placement.",
    ),
    (HEAD + "base: int8\n", "the plan, line 3: base cannot be 'int8'. Choices: fp32, fp16, bf16."),
    (HEAD + "pins: none\n", "the plan, line 3: pins cannot be 'none'. A list is needed."),
    (
        HEAD + "pins:\n- softmax\n",
        "the plan, line 4: pin 1 cannot be 'softmax'. Keys with values are needed.",
    ),
    (
        HEAD + "pins:\n- {role: norm, format: fp16}\n- {mtch: a, format: fp16}\n",
        "the plan, line 5: pin 2 has an unknown key 'mtch'. Did you mean 'match'?",
    ),
    (HEAD + "pins:\n- {match: a}\n", "the plan, line 4: pin 1 has no key 'format'. Add format."),
    (
        HEAD + "pins:\n- match: a\n  format: half\n",
        "the plan, line 5: pin 1 format cannot be 'half'. "
        "Choices: fp32, tf32, fp16, bf16, int8, fp8, int4, mxfp8, nvfp4.",
    ),
    (
        HEAD + "pins:\n- {format: fp16}\n",
        "the plan, line 4: pin 1: no target. Give match, role, op_type or block.",
    ),
    (
        HEAD + "pins:\n- {match: 12, format: fp16}\n",
        "the plan, line 4: pin 1 match cannot be 12. Text is needed; quote it.",
    ),
    (
        HEAD + 'pins:\n- {match: "", format: fp16}\n',
        "the plan, line 4: pin 1 match cannot be ''. Text is needed.",
    ),
    (
        HEAD + 'pins:\n- {match: "re:a; (", format: fp16}\n',
        "the plan, line 4: pin 1: regular expression 'a; (' is invalid: "
        "missing ), unterminated subpattern at position 3.",
    ),
    (
        HEAD + "pins:\n- {block: x, format: fp16}\n",
        "the plan, line 4: pin 1: block 'x' is neither a number nor a range such as 0-2.",
    ),
    (
        HEAD + "pins:\n- {block: true, format: fp16}\n",
        "the plan, line 4: pin 1: block True is neither a number nor a range such as 0-2.",
    ),
    (
        HEAD + "pins:\n- {block: -1, format: fp16}\n",
        "the plan, line 4: pin 1: block -1 is neither a number nor a range such as 0-2.",
    ),
    (
        HEAD + "pins:\n- {block: 3-1, format: fp16}\n",
        "the plan, line 4: pin 1: block range '3-1' ends before it begins.",
    ),
    (
        HEAD + "pins:\n- {match: a, format: fp16}\n- {role: n, format: fp16}\n- {match: a, format: fp32}\n",
        "the plan, line 6: pins 1 (fp16) and 3 (fp32) contradict each other: both are for match 'a'. "
        "Keep one of them.",
    ),
    (
        HEAD + "pins:\n- {role: norm, block: 2, format: fp16}\n- {role: norm, block: 2-2, format: bf16}\n",
        "the plan, line 5: pins 1 (fp16) and 2 (bf16) contradict each other: both are for role 'norm' and "
        "block 2. Keep one of them.",
    ),
    (
        HEAD + "quantizer: {method: entrpy}\n",
        "the plan, line 3: quantizer.method cannot be 'entrpy'. Did you mean 'entropy'?",
    ),
    (
        HEAD + "quantizer:\n  weight: per_channel\n",
        "the plan, line 4: quantizer has an unknown key 'weight'. Did you mean 'weights'?",
    ),
    (
        HEAD + "constants: {out_of_range: nan}\n",
        "the plan, line 3: constants.out_of_range cannot be 'nan'. Choices: clamp, inf.",
    ),
    (
        HEAD + "quantizer: {block_size: 48}\n",
        "the plan, line 3: quantizer.block_size cannot be 48. Choices: 32, 64, 128.",
    ),
    (HEAD + "placement: fuse\n", "the plan, line 3: placement cannot be 'fuse'. Did you mean 'fused'?"),
    (HEAD + "default: fp16\n", "the plan, line 3: key 'default' is given twice. Keep one of the two."),
    (
        HEAD + "pins:\n- {role: norm,\n   role: ffn, format: fp16}\n",
        "the plan, line 5: key 'role' is given twice. Keep one of the two.",
    ),
    (
        HEAD + "pins: [{role: norm, format: fp16}\n",
        "the plan, line 4, is not valid YAML: expected ',' or ']', but got '<stream end>'. Mend the line.",
    ),
    (
        HEAD + "base: !!python/object/apply:os.system [true]\n",
        "the plan, line 3, is not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'. Mend the line.",
    ),
    (
        HEAD + "pins:\n- &p {role: norm, format: fp16}\n- *p\n",
        "the plan, line 4: YAML aliases are not read. Write the value out.",
    ),
    ("[" * 5000, "the plan is nested too deeply. Give the path of a YAML plan."),
    (
        "schema: \0\n",
        "the plan is not valid YAML: unacceptable character #x0000: special characters are not allowed. "
        "Give the path of a YAML plan.",
    ),
    (
        HEAD + "---\n" + HEAD,
        "the plan, line 3, is not valid YAML: but found another document. Mend the line.",
    ),
    ("#" * 4_000_001, "the plan is 4,000,001 characters long. Give the path of a YAML plan."),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[sentence[:60] for _, sentence in REFUSED])
def test_bad_plans_are_refused_in_one_sentence_with_the_line(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_yaml(text)
    assert str(caught.value) == sentence
    assert caught.value.exit_code == 2


def test_an_alias_bomb_ends_at_once() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(PlanError, match="YAML aliases are not read"):
        plan_from_yaml("\n".join(levels))


def test_values_from_elsewhere_are_refused_without_a_line() -> None:
    with pytest.raises(PlanError) as caught:
        plan_for_format("int88")
    assert (
        str(caught.value) == "the requested plan: default cannot be 'int88'. Did you mean 'int8' or 'int4'?"
    )
    with pytest.raises(PlanError) as caught:
        plan_from_mapping({"schema": "trtdiag.plan/1", "default": "int8", "x": 1}, "--plan")
    assert str(caught.value).startswith("--plan: unknown key 'x'. Known keys: schema,")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, latin = tmp_path / "no.yaml", tmp_path / "latin.yaml"
    latin.write_bytes("schema: \xe4".encode("latin-1"))
    for path, sentence in (
        (missing, f"plan {str(missing)!r} cannot be read: No such file or directory. Check the path."),
        (tmp_path, f"plan {str(tmp_path)!r} cannot be read: Is a directory. Check the path."),
        (latin, f"plan {str(latin)!r} is not UTF-8 text. Give the path of a YAML plan."),
    ):
        with pytest.raises(PlanError) as caught:
            read_plan(path)
        assert str(caught.value) == sentence
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan("a\0b")


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write_plan(Plan(default="int8"), tmp_path / "absent" / "plan.yaml")
    assert list(tmp_path.iterdir()) == []


def test_the_written_form_is_stable_and_in_field_order(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    pins = (Pin(match="/a/ü", format="fp16", reason="why"), Pin(role="norm", block="0-2", format="bf16"))
    write_plan(Plan(default="int8", base="fp16", pins=pins), path)
    assert path.read_text(encoding="utf-8") == (
        "schema: trtdiag.plan/1\n"
        "default: int8\n"
        "base: fp16\n"
        "pins:\n"
        "- {match: /a/ü, format: fp16, reason: why}\n"
        "- {role: norm, block: 0-2, format: bf16}\n"
        "quantizer: {activations: per_tensor, weights: per_channel}\n"
        "constants: {out_of_range: clamp}\n"
        "placement: inputs\n"
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
formats = st.sampled_from(["fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "mxfp8", "nvfp4"])
pins = st.builds(
    Pin,
    match=st.none() | texts.filter(lambda text: not text.startswith("re:")),
    role=st.none() | texts,
    op_type=texts,
    block=st.none() | st.integers(0, 99) | st.just("0-2"),
    format=formats,
    reason=texts | st.just(""),
    alone=st.booleans(),
)
plans = st.builds(
    Plan,
    default=formats,
    base=st.sampled_from(["fp32", "fp16", "bf16"]),
    pins=st.lists(pins, max_size=4, unique_by=lambda pin: pin.target).map(tuple),
)


@given(plans)
def test_writing_and_reading_gives_the_same_plan(plan: Plan) -> None:
    assert plan_from_yaml(plan_to_yaml(plan)) == plan


def test_the_hash_is_of_what_is_asked_for() -> None:
    pin = Pin(match="a", format="fp16")
    first = plan_sha256(Plan(default="int8", pins=(pin,)))
    same = Plan(default="int8", base="fp32", pins=(Pin(match="a", format="fp16", reason="measured"),))
    assert plan_sha256(same) == first
    others = [
        Plan(default="int8"),
        Plan(default="fp8", pins=(pin,)),
        Plan(default="int8", base="fp16", pins=(pin,)),
        Plan(default="int8", pins=(Pin(match="b", format="fp16"),)),
        Plan(default="int8", pins=(Pin(match="a", format="bf16"),)),
        Plan(default="int8", pins=(Pin(match="a", format="fp16", alone=True),)),
        Plan(default="int8", pins=(pin, Pin(match="b", format="fp16"))),
        Plan(default="int8", pins=(Pin(match="b", format="fp16"), pin)),
        Plan.model_validate({"default": "int8", "pins": (pin,), "quantizer": {"method": "mse"}}),
    ]
    hashes = [plan_sha256(plan) for plan in others]
    assert len({first, *hashes}) == len(others) + 1


def test_the_hash_does_not_depend_on_the_process() -> None:
    code = (
        "from diag.plan.schema import *; print(plan_sha256(Plan(default='int8', pins=("
        "Pin(role='norm', block=1, op_type='Add', format='fp16'),))))"
    )
    root = Path(__file__).resolve().parents[2]
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == 64


def test_the_json_schema_refuses_unknown_keys_and_says_what_fields_mean() -> None:
    schema = Plan.model_json_schema()
    assert schema["required"] == ["schema", "default"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Pin"]["additionalProperties"] is False
    assert "regular expression" in schema["$defs"]["Pin"]["properties"]["match"]["description"]
    assert json.dumps(schema)
