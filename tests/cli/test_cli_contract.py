"""What every command promises: help with an example, one JSON object, silence, exit codes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml

import diag
from diag.cli.main import app
from diag.report.io import loads, read_report
from diag.report.schema import Report

PROMISED = ("compare", "calibrate", "convert", "gate", "report", "doctor", "demo")
COMMANDS = tuple(str(info.name) for info in app.registered_commands)
QUICK = ("calibrate", "compare", "compare-dry", "convert", "gate", "report", "doctor")
"""One way to call each command that runs in a second; the demo has a test of its own."""


@pytest.fixture
def call(model: Path, data: Path, table: Path, report: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    """The words of a call that works."""
    calls = {
        "calibrate": f"calibrate {model} --data {data} --out {tmp_path}/table.json",
        "compare": f"compare {model} --format int8 --calibration {table} --data {data} --out {tmp_path}/out",
        "compare-dry": f"compare {model} --format fp16 --data {data} --out {tmp_path}/out --dry-run",
        "convert": f"convert {model} --format bf16 --out {tmp_path}/typed.onnx",
        "gate": f'gate {report} --fail-under "sqnr_db>=20"',
        "report": f"report {report} --out {tmp_path}/page.html",
        "doctor": "doctor",
    }
    return lambda name: shlex.split(calls[name])


def test_the_promised_commands_are_there():
    assert set(PROMISED) <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_of_its_own(trtdiag, name):
    ended = trtdiag(name, "--help")
    assert (ended.code, ended.err) == (0, "")
    text = " ".join(ended.out.split())
    assert f"Usage: trtdiag {name}" in text
    assert f"Example: trtdiag {name} " in text
    assert "--json" in text
    assert "--quiet" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_is_accepted(name):
    """Its words parse: commands, options, and the checks inside options."""
    info = next(info for info in app.registered_commands if info.name == name)
    for example in str(info.epilog).removeprefix("Example: ").split("; "):
        words = shlex.split(example)
        assert words[:2] == ["trtdiag", name]
        command = typer.main.get_command(app).commands[name]
        assert command.make_context(name, words[2:]).params


@pytest.mark.parametrize("name", QUICK)
def test_json_is_one_object_and_nothing_else(trtdiag, call, name):
    ended = trtdiag(*call(name), "--json")
    assert ended.code == 0
    assert ended.json
    assert ended.err == ""


@pytest.mark.parametrize("name", QUICK)
def test_quiet_says_nothing(trtdiag, call, name):
    ended = trtdiag(*call(name), "--quiet")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize("name", QUICK)
def test_people_get_text(trtdiag, call, name):
    ended = trtdiag(*call(name))
    assert ended.code == 0
    assert ended.out.strip()
    assert "\n\n\n" not in ended.err
    assert all(line.startswith("trtdiag: ") for line in ended.err.splitlines())


def test_quiet_json_still_gives_the_object(trtdiag, call):
    assert trtdiag(*call("gate"), "--json", "--quiet").json["passed"] is True


def test_compare_json_is_the_report_that_was_written(trtdiag, call, tmp_path):
    ended = trtdiag(*call("compare"), "--json")
    assert loads(ended.out, "stdout") == read_report(tmp_path / "out" / "report.json")


def test_compare_writes_what_it_names_and_nothing_else(trtdiag, call, tmp_path):
    trtdiag(*call("compare"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["plan.yaml", "report.html", "report.json"]
    assert yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())["default"] == "int8"


def test_save_typed_writes_the_typed_model(trtdiag, call, tmp_path):
    trtdiag(*call("compare"), "--save-typed")
    assert (tmp_path / "out" / "typed.onnx").stat().st_size > 10_000


def test_the_command_is_kept_in_the_report(process, model, data, tmp_path):
    words = ["compare", model, "--format", "fp16", "--data", data, "--out", tmp_path / "o", "--quiet"]
    assert process(*words).code == 0
    assert read_report(tmp_path / "o" / "report.json").run.command == shlex.join(
        ["trtdiag", *map(str, words)]
    )


def test_dry_run_writes_nothing_and_says_what_it_will_take(trtdiag, call, tmp_path):
    found = trtdiag(*call("compare-dry"), "--json").json
    assert found["batches"] == 3
    assert found["seconds"] > 0
    assert found["memory_mb"] > 0
    assert list((tmp_path / "out").iterdir()) == []


def test_version(trtdiag):
    assert trtdiag("--version").out == f"trtdiag {diag.__version__}\n"


@pytest.mark.parametrize(("bound", "code"), [("30", 0), ("99", 1)])
def test_compare_exits_1_only_when_the_gate_is_missed(trtdiag, call, tmp_path, bound, code):
    ended = trtdiag(*call("compare"), "--fail-under", f"sqnr_db>={bound}", "--json")
    assert ended.code == code
    assert ended.json["gate"]["passed"] is (code == 0)
    assert read_report(tmp_path / "out" / "report.json").gate.passed is (code == 0)


def test_every_threshold_counts(trtdiag, call):
    ended = trtdiag(*call("compare"), "--fail-under", "cosine>=0.9", "--fail-under", "sqnr_db>=99", "--json")
    assert ended.code == 1
    assert [check["passed"] for check in ended.json["gate"]["checks"]] == [True, False]


@pytest.mark.parametrize(("check", "code"), [("sqnr_db>=30", 0), ("sqnr_db>=99", 1), ("top1>=0.5", 1)])
def test_gate_exit_codes(trtdiag, report, check, code):
    ended = trtdiag("gate", report, "--fail-under", check)
    assert ended.code == code
    assert ended.out.splitlines()[-1] == ("passed" if code == 0 else "failed")


def test_the_report_page_is_the_one_that_compare_wrote(trtdiag, report, tmp_path):
    assert trtdiag("report", report, "--out", tmp_path / "new" / "page.html").code == 0
    page = (tmp_path / "new" / "page.html").read_text()
    assert page == report.with_name("report.html").read_text()


def test_doctor_names_the_whole_line_that_installs_what_is_missing(trtdiag):
    """Brackets in `trtdiag[rtx]` were once taken for markup, and vanished."""
    found = trtdiag("doctor", "--json").json["engines"]
    lines = trtdiag("doctor").out.splitlines()
    assert any(engine["name"] == "emulate" and engine["usable"] for engine in found)
    for engine in found:
        assert any(line.startswith(engine["name"]) for line in lines)
        for said in (engine["can"], engine["missing"], engine["install"]):
            assert any(line.endswith(said) for line in lines)


@pytest.mark.parametrize("name", ["a[/b]", "[red]", ":smile:", "with space", "x" * 120])
def test_names_come_through_as_they_are(trtdiag, report, tmp_path, name):
    out = tmp_path / name / "page.html"
    ended = trtdiag("report", report, "--out", out)
    assert (ended.code, ended.out) == (0, f"written: {out}\n")
    assert out.is_file()


def test_convert_names_formats_and_groups(trtdiag, model, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("schema: trtdiag.plan/1\ndefault: fp16\npins: [{role: norm, format: fp32}]\n")
    found = trtdiag("convert", model, "--plan", plan, "--out", tmp_path / "t.onnx", "--json").json
    assert found["layers"]["fp16"] > 0
    assert found["layers"]["fp32"] > 40  # five norms of nine nodes each, and what FP16 does not touch
    assert (tmp_path / "t.onnx").is_file()


def test_report_model_dump_is_what_json_prints(report):
    """Guards the way `compare --json` is made: nothing in a report may need a float that JSON lacks."""
    text = report.read_text()
    assert loads(text, "report") == Report.model_validate(loads(text, "report").model_dump(by_alias=True))
