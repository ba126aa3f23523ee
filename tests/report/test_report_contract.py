"""The report file: strict JSON, round trip, refusal of what it does not know, and its published schema."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from diag.errors import ReportError
from diag.report.io import dumps, loads, read_report, write_report
from diag.report.schema import Report

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "render" / "sample_report.json"


@pytest.fixture(scope="module")
def sample() -> Report:
    return read_report(SAMPLE)


@pytest.fixture
def raw() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))
    return found


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_strict_json(sample: Report) -> None:
    raw = json.loads(dumps(sample), parse_constant=_refuse)
    log = next(layer for layer in raw["layers"] if layer["name"] == "/decoder/Log")
    assert log["accumulated"]["sqnr_db"] == "-Infinity"
    assert log["accumulated"]["channel_min_sqnr_db"] == "NaN"
    assert raw["schema"] == "trtdiag.report/1"


def test_round_trip(sample: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(sample, path)
    again = read_report(path)
    assert dumps(again) == dumps(sample)
    log = next(layer for layer in again.layers if layer.name == "/decoder/Log")
    assert math.isnan(log.accumulated["channel_min_sqnr_db"])
    assert log.accumulated["sqnr_db"] == -math.inf


@pytest.mark.parametrize(
    "place",
    [
        (),
        ("model",),
        ("run",),
        ("layers", 0),
        ("outputs", 0),
        ("births", 0),
        ("findings", 0),
        ("gate",),
        ("plan",),
    ],
)
def test_unknown_keys_are_refused(raw: dict[str, Any], place: tuple[str | int, ...]) -> None:
    part: Any = raw
    for step in place:
        part = part[step]
    part["misspelt"] = 1
    with pytest.raises(ReportError, match="misspelt"):
        loads(json.dumps(raw), "r.json")


@pytest.mark.parametrize("schema", [None, "trtdiag.report/2", 1])
def test_another_schema_is_refused(raw: dict[str, Any], schema: object) -> None:
    raw["schema"] = schema
    with pytest.raises(ReportError, match=r"not a trtdiag\.report/1 report"):
        loads(json.dumps(raw), "r.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ReportError, match=r"r\.json"):
        loads(text, "r.json")


@pytest.mark.parametrize("value", ["twelve", None, [1], {}])
def test_other_spellings_of_numbers_are_refused(raw: dict[str, Any], value: object) -> None:
    raw["layers"][0]["accumulated"]["sqnr_db"] = value
    with pytest.raises(ReportError, match="sqnr_db"):
        loads(json.dumps(raw), "r.json")


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot be read") as caught:
        read_report(tmp_path / "none.json")
    assert caught.value.exit_code == 2


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_published_schema_is_current() -> None:
    generator = _generator()
    committed = generator.REPORT_SCHEMA.read_text(encoding="utf-8")
    assert committed == generator.report_schema(), "run: python docs/generate.py"


def test_published_schema_accepts_what_is_written(raw: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert list(validator.iter_errors(raw)) == []
    raw["layers"][0]["accumulated"]["sqnr_db"] = "inf"
    raw["misspelt"] = 1
    assert len(list(validator.iter_errors(raw))) == 2
