"""What the documents say is true: commands and options exist, examples work, generated pages are current."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from diag.cli.main import app
from diag.pipeline.build import audit_findings
from diag.pipeline.engine import findings as engine_findings
from diag.plan.schema import plan_from_yaml
from diag.resources import data_dir

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
COMMANDS = typer.main.get_command(app).commands


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_generated_pages_are_current(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[name](), "run: python docs/generate.py"


def lines_of(document: Path) -> list[str]:
    """Command lines in code blocks, in `inline code`, and behind `make`; continued lines joined."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^(?:    |\t)(trtdiag .*)$", text, re.M)
    blocks += [line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.splitlines()]
    inline = re.findall(r"`(trtdiag [^`]*)`", text)
    return [
        line.strip().replace(r"\|", "|") for line in (*blocks, *inline) if line.strip().startswith("trtdiag ")
    ]


def options_of(command) -> set[str]:
    return {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")} | {"--help"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_and_options_that_are_named_exist(document):
    for line in lines_of(document):
        words = shlex.split(line.split("#")[0])
        if words[1].startswith("-"):
            continue
        assert words[1] in COMMANDS, f"{document.name}: {line}"
        known = options_of(COMMANDS[words[1]])
        for word in words[2:]:
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{document.name}: {line}"


def test_the_readmes_table_lists_every_command():
    table = re.findall(r"^\| `trtdiag (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(table) == sorted(COMMANDS)


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^    |`)make ([a-z]+)", text, re.M))
        assert named <= targets, document.name


def yaml_blocks() -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(encoding="utf-8"), re.S):
            if "trtdiag.plan/1" in block:
                found.append((document.name, block))
    return found


def test_the_readme_shows_a_plan():
    assert any(name == "README.md" for name, _ in yaml_blocks())


@pytest.mark.parametrize(("name", "block"), yaml_blocks())
def test_plans_in_the_documents_are_valid(name, block):
    plan = plan_from_yaml(block, name)
    schema = json.loads((ROOT / "docs" / "plan.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(block), schema)
    assert plan.pins


def test_files_that_are_named_exist():
    for document in DOCUMENTS:
        for path in re.findall(
            r"`((?:docs|diag|rules|fixtures|tests|benchmarks)/[\w./-]+)`", document.read_text()
        ):
            exists = (ROOT / path).exists() or (ROOT / f"{path}.py").exists()
            assert exists, f"{document.name}: {path}"


@pytest.mark.parametrize("name", ["report", "plan", "calibration", "stats"])
def test_schemas_are_schemas(name):
    schema = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"][0] == "schema"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, schema)


def test_a_report_and_a_table_meet_their_schemas(tmp_path):
    import numpy as np
    import onnx

    from diag.cli.main import run
    from fixtures.graphs import bert

    fixture = bert()
    onnx.save(fixture.model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **fixture.batch())
    model, data, out = tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "out"
    for words in (
        ("calibrate", model, "--data", data, "--out", tmp_path / "t.json"),
        ("compare", model, "--format", "int8", "--data", data, "--out", out),
    ):
        with pytest.raises(SystemExit) as end:
            run([*map(str, words), "--quiet"])
        assert not end.value.code
    made = {"report": out / "report.json", "calibration": tmp_path / "t.json"}
    for name, file in made.items():
        schema = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text(encoding="utf-8"))
        jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), schema)
    plan = yaml.safe_load((out / "plan.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(plan, json.loads((ROOT / "docs" / "plan.schema.json").read_text(encoding="utf-8")))


def emitted_kinds() -> set[str]:
    """Kinds that the code gives to findings: literal ones, and those of its tables."""
    found = set(audit_findings.FINDING_KINDS.values())
    found |= {kind for kind, _ in engine_findings._KINDS.values()}
    files = [*(ROOT / "diag" / "pipeline").glob("*.py"), *(ROOT / "diag" / "lint").glob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hazards":
                rule = node.args[0].elts[1] if isinstance(node.args[0], ast.Tuple) else None
                found |= {rule.value} if isinstance(rule, ast.Constant) else set()
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Finding", "Cause"):
                given = [k.value for k in node.keywords if k.arg == "kind"] + node.args[:1]
                found |= {c.value for v in given for c in ast.walk(v) if isinstance(c, ast.Constant)}
            if isinstance(node, ast.FunctionDef) and node.name == "overflow_kind":
                returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
                found |= {value.value for value in returns}
    return found


def test_every_kind_of_finding_is_explained():
    known = yaml.safe_load((data_dir("rules") / "finding_kinds.yaml").read_text(encoding="utf-8"))
    assert all(isinstance(meaning, str) and meaning.endswith(".") for meaning in known.values())
    missing = emitted_kinds() - known.keys()
    assert not missing
    assert len(emitted_kinds()) > 8
