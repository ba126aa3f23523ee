"""Cells: text, sort key and class of every kind of number."""

from __future__ import annotations

import math

import pytest

from diag.render.cells import Cell, heading, metric_cell, metric_column, metric_text, sqnr_of, with_unit


@pytest.mark.parametrize(
    ("name", "value", "cell"),
    [
        ("sqnr_db", 31.44, Cell("31.4", 31.44)),
        ("sqnr_db", -0.01, Cell("0.0", -0.01)),
        ("sqnr_db", math.inf, Cell("exact", math.inf, "exact", "identical to the reference")),
        ("sqnr_db", -math.inf, Cell("−∞", -math.inf, "bad")),
        ("sqnr_db", math.nan, Cell("NaN", -math.inf, "bad", "not a number")),
        ("rel_l2", math.nan, Cell("NaN", math.inf, "bad", "not a number")),
        ("rel_l2", math.inf, Cell("∞", math.inf, "bad")),
        ("rel_l2", 0.123456, Cell("0.123", 0.123456)),
        ("mean_error", -0.0, Cell("0", 0.0)),
        ("elements", 1_210_368.0, Cell("1,210,368", 1_210_368.0)),
        ("nonfinite", 0.0, Cell("0", 0.0)),
        ("nonfinite", 12.0, Cell("12", 12.0, "bad")),
        ("cosine", 0.99999999, Cell(">0.99999", 0.99999999)),
        ("cosine", 1.0, Cell("1.00000", 1.0)),
        ("top1", 0.999999, Cell(">0.9999", 0.999999)),
        ("unknown_metric", 3.0, Cell("3", 3.0)),
        ("sqnr_db", None, Cell("—", None, "mute")),
    ],
)
def test_metric_cells(name: str, value: float | None, cell: Cell) -> None:
    assert metric_cell(name, value) == cell


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        (Cell("31.4", 31.44), None),
        (Cell("exact", math.inf), "Infinity"),
        (Cell("NaN", -math.inf), "-Infinity"),
        (Cell("1,210", 1210.0), "1210"),
        (Cell(">0.9999", 0.999999), "0.999999"),
        (Cell("—", None), None),
        (Cell("name", "name"), None),
    ],
)
def test_sort_keys_are_written_only_where_the_text_does_not_tell(cell: Cell, written: str | None) -> None:
    assert cell.explicit_key == written


def test_units_stand_in_sentences() -> None:
    assert with_unit("sqnr_db", 17.61) == "17.6 dB"
    assert with_unit("sqnr_db", math.inf) == "exact"
    assert with_unit("rel_l2", 0.25) == "0.25"


def test_sqnr_comes_from_relative_error_when_it_is_missing() -> None:
    assert sqnr_of({"rel_l2": 0.1}) == pytest.approx(20.0)
    assert sqnr_of({"rel_l2": 0.0}) == math.inf
    assert sqnr_of({"rel_l2": math.inf}) == -math.inf
    assert math.isnan(sqnr_of({"rel_l2": math.nan}) or 0.0)
    assert sqnr_of({"cosine": 1.0}) is None


def test_columns_sort_the_worst_first() -> None:
    assert metric_column("sqnr_db").worst_first == "asc"
    assert metric_column("rel_l2").worst_first == "desc"
    assert metric_column("elements").worst_first == ""


def test_headings_leave_node_names_alone() -> None:
    assert heading("levels_used") == "levels used"
    assert heading("local_sqnr_db of /my_layer/MatMul") == "local_sqnr_db of /my_layer/MatMul"


def test_text_is_never_rounded_up_to_perfect() -> None:
    assert metric_text("cosine", 1 - 1e-12) != metric_text("cosine", 1.0)
