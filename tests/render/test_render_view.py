"""The page's data: what each part says, before any HTML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_sample
import pytest
import yaml

from diag.render.cards import MAX_VICTIMS, pins_yaml
from diag.render.cells import Table
from diag.render.picture import MAX_HOVERS, picture
from diag.render.tables import layers_table, outputs_table
from diag.render.view import headline, page
from diag.report.io import dumps
from diag.report.schema import Finding, GateResult, LayerInfo, PinInfo, Report


def _column(table: Table, title: str) -> int:
    return [column.title for column in table.columns].index(title)


def _texts(table: Table, row: int) -> dict[str, str]:
    return {c.title: cell.text for c, cell in zip(table.columns, table.rows[row].cells, strict=True)}


def _row_of(report: Report, name: str) -> int:
    return [layer.name for layer in report.layers].index(name)


def test_sample_is_current() -> None:
    committed = Path(make_sample.SAMPLE).read_text(encoding="utf-8")
    assert committed == dumps(make_sample.report()) + "\n", "run: python tests/render/make_sample.py"


def test_layer_cells(sample: Report) -> None:
    row = _texts(layers_table(sample), _row_of(sample, "/blocks.1/attn/pv/MatMul"))
    assert row["Layer"] == "/blocks.1/attn/pv/MatMul"
    assert (row["Role"], row["Block"], row["Op"], row["Format"]) == ("pv_matmul", "1", "MatMul", "int8")
    assert row["Accumulated"] == "22.0"
    assert row["Local"] == "21.3"
    assert row["Status"] == "compared"
    assert row["Notes"] == "error begins here (1)"


def test_not_observable_is_never_a_number(sample: Report) -> None:
    table = layers_table(sample)
    row = table.rows[_row_of(sample, "/blocks.0/attn/scale/Mul")]
    first = _column(table, "Accumulated")
    measured = row.cells[first : _column(table, "Worst batch") + 1]
    assert {cell.text for cell in measured} == {"—"}
    assert all(cell.sort_key is None for cell in measured)
    assert row.cells[_column(table, "Status")].text == "not observable"
    assert "fused" in row.cells[_column(table, "Notes")].text


def test_metrics_of_a_layer_that_was_not_observed_are_not_shown(
    sample: Report, with_layers: Callable[..., Report]
) -> None:
    liar = sample.layers[0].model_copy(update={"status": "not_observable"})
    assert liar.accumulated
    texts = _texts(layers_table(with_layers(liar)), 0)
    assert texts["Accumulated"] == texts["Local"] == texts["Channel min"] == "—"


def test_nonfinite_and_zeroed_values_are_said(sample: Report) -> None:
    table = layers_table(sample)
    log = _texts(table, _row_of(sample, "/decoder/Log"))
    assert log["Accumulated"] == "−∞"
    assert log["Channel min"] == "NaN"
    assert "12 not finite" in log["Notes"]
    assert "3 rows zeroed" in _texts(table, _row_of(sample, "/blocks.1/mlp/act/Gelu"))["Notes"]
    assert table.rows[_row_of(sample, "/decoder/Log")].css == "born"


def test_outputs_show_the_metrics_that_exist(sample: Report) -> None:
    table = outputs_table(sample)
    assert _texts(table, 0)["KL"] == "—"
    assert _texts(table, 1)["Top-1"] == "0.9688"
    assert _texts(table, 0)["Worst case"] == "batch 3, element [0, 0, 112, 41]"


def test_engine_column_only_with_engine_numbers(sample: Report, with_layers: Callable[..., Report]) -> None:
    titles = [column.title for column in layers_table(sample).columns]
    assert "Engine" in titles
    without = with_layers(*(layer.model_copy(update={"engine": {}}) for layer in sample.layers))
    assert "Engine" not in [column.title for column in layers_table(without).columns]


def test_headline_follows_the_gate(sample: Report, bare: Report) -> None:
    assert headline(sample).tone == "bad"
    passed = sample.model_copy(update={"gate": GateResult(passed=True)})
    assert (headline(passed).tone, headline(passed).label) == ("ok", "Pass")
    assert headline(bare).tone == "plain"
    assert headline(bare).sentence == "No output was compared."


def test_without_a_gate_nothing_is_called_a_pass(sample: Report) -> None:
    quiet = sample.model_copy(update={"gate": None, "findings": [], "births": []})
    assert headline(quiet).label == "Measured"
    broken = quiet.outputs[0].model_copy(update={"metrics": {"sqnr_db": 50.0, "nonfinite": 1.0}})
    assert headline(quiet.model_copy(update={"outputs": [broken]})).label == "Damaged"


def test_random_data_and_untrusted_reference_are_said_loudly(sample: Report) -> None:
    trust = sample.run.reference
    assert trust is not None
    shaky = trust.model_copy(update={"trusted": False, "nonfinite_tensors": ["x", "y"]})
    run = sample.run.model_copy(update={"random_data": True, "reference": shaky})
    found = page(sample.model_copy(update={"run": run})).warnings
    assert [text.split(":")[0].split(" (")[0] for text in found] == [
        "Random data",
        "The FP32 reference is not stable",
        "The FP32 reference itself is not finite in 2 tensors",
    ]
    assert page(sample).warnings == ()


def test_births_and_findings(sample: Report) -> None:
    shown = page(sample)
    first, second = shown.births
    assert first.change == "SQNR 33.1 → 19.8 dB"
    assert len(first.victims) == 24
    assert first.row_anchor == f"L{_row_of(sample, first.layer) + 1}"
    assert not second.reaches_output
    assert shown.findings[0].responsibility.startswith(
        "Measured: responsible. Keeping only these layers in FP32"
    )
    assert shown.findings[1].responsibility.startswith("Measured: present, not responsible.")
    assert shown.findings[2].responsibility == "Its part in the error was not measured."
    assert {fact.name: fact.text for fact in shown.findings[1].evidence}[
        "largest_ratio".replace("_", " ")
    ] == "∞"


def test_many_victims_are_counted_not_listed(sample: Report) -> None:
    birth = sample.births[0].model_copy(update={"victims": [f"v{n}" for n in range(MAX_VICTIMS + 7)]})
    card = page(sample.model_copy(update={"births": [birth]})).births[0]
    assert len(card.victims) == MAX_VICTIMS
    assert card.victims_left_out == 7


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("role 'norm'", {"role": "norm"}),
        ("match 're:^/a\\\\.b$' and block '0-2'", {"match": "re:^/a\\.b$", "block": "0-2"}),
        ("block 3", {"block": 3}),
        ("op_type:LayerNormalization", {"op_type": "LayerNormalization"}),
        ('/layers.3/attn: {pv}, "x"', {"match": '/layers.3/attn: {pv}, "x"'}),
        ("yes", {"match": "yes"}),
        ("12", {"match": "12"}),
    ],
)
def test_pins_are_yaml_of_a_plan(target: str, expected: dict[str, object]) -> None:
    text = pins_yaml([PinInfo(target=target, format="fp16", reason='a "reason": #1')])
    assert yaml.safe_load(text) == {"pins": [{**expected, "format": "fp16", "reason": 'a "reason": #1'}]}


def test_picture_places_layers(sample: Report) -> None:
    drawn = picture(sample)
    assert drawn is not None
    accumulated, local, engine = drawn.series
    assert (accumulated.name, local.name, engine.name) == ("accumulated", "local", "engine")
    assert accumulated.exact.count("M") == 1
    assert accumulated.broken.count("m0-8") == 1
    assert drawn.unseen.count("M") == 2
    assert [mark.label for mark in drawn.births] == ["1", "2"]
    assert [band.label for band in drawn.bands] == ["0", "1", "2", "3"]
    assert "nan" not in accumulated.dots + accumulated.line
    assert "not observable — fused" in drawn.hovers[_row_of(sample, "/blocks.0/attn/scale/Mul")].title


def test_picture_clamps_and_survives_odd_values(sample: Report, with_layers: Callable[..., Report]) -> None:
    values = [1e9, -1e9, float("nan"), float("inf"), float("-inf"), 30.0]
    layers = [sample.layers[0].model_copy(update={"accumulated": {"sqnr_db": value}}) for value in values]
    drawn = picture(with_layers(*layers))
    assert drawn is not None
    assert drawn.series[0].dots.count("M") == 3
    assert drawn.series[0].broken.count("m0-8") == 2
    assert "nan" not in drawn.series[0].dots
    assert "inf" not in drawn.series[0].dots


def test_no_picture_without_errors(bare: Report, with_layers: Callable[..., Report], sample: Report) -> None:
    assert picture(bare) is None
    unseen = sample.layers[0].model_copy(
        update={"status": "not_run", "accumulated": {}, "local": {}, "engine": {}}
    )
    assert picture(with_layers(unseen)) is None


def test_areas_to_hover_are_bounded(with_layers: Callable[..., Report]) -> None:
    layers: list[LayerInfo] = make_sample.layers(blocks=100)
    drawn = picture(with_layers(*layers))
    assert drawn is not None
    assert len(layers) > MAX_HOVERS
    assert len(drawn.hovers) == MAX_HOVERS
    assert "worst of layers" in drawn.hovers[0].title + drawn.hovers[1].title


def test_page_of_a_bare_report(bare: Report) -> None:
    shown = page(bare)
    assert shown.picture is None
    assert shown.kernels is None
    assert shown.checks is None
    assert shown.births == ()


def test_an_engine_that_was_only_read_claims_no_comparison(sample: Report, bare: Report) -> None:
    layers = [layer.model_copy(update={"status": "not_run"}) for layer in sample.layers]
    read = bare.model_copy(update={"kernels": sample.kernels, "layers": layers, "verdict": "1 kernel."})
    shown = page(read)
    assert (shown.compared, shown.headline.label) == (False, "Nothing found")
    assert [tile.name for tile in shown.tiles] == ["errors", "warnings", "notes"]
    assert shown.kernels is not None
    assert page(read.model_copy(update={"layers": sample.layers})).compared


def test_finding_without_layers(bare: Report) -> None:
    finding = Finding(id="F1", kind="drift", severity="note", title="t")
    assert page(bare.model_copy(update={"findings": [finding]})).findings[0].layers == ()


def test_what_an_engine_made_of_a_format_is_shown_where_it_differs(sample: Report) -> None:
    layers = [layer.model_copy(update={"built": "fp32"}) for layer in sample.layers]
    table = layers_table(sample.model_copy(update={"layers": layers}))
    column = _column(table, "Format")
    for layer, row in zip(layers, table.rows, strict=True):
        assert row.cells[column].sub == ("" if layer.format == "fp32" else "built: fp32")
    assert not any(row.cells[column].sub for row in layers_table(sample).rows)
