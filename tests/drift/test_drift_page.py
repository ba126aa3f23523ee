"""The drift part of the page: escaped, self-contained, and true to the report."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from diag.render.drift_text import drift_summary
from diag.render.drift_view import drift_view, ranked
from diag.render.html import render_html
from diag.report.drift import (
    Drift,
    DriftAdvice,
    DriftCost,
    DriftDay,
    DriftFigure,
    DriftRequest,
    DriftSlice,
    DriftTensor,
)
from diag.report.io import dumps, loads
from diag.report.schema import Finding, ModelInfo, Report, RunInfo

HOSTILE = "</script><img src=x onerror=alert(1)>"
NAMES = ("sqnr_loss_db", "saturation", "overflow", "under_use", "wasserstein_steps")


def tensor(name: str, level: str = "ok", loss: float = 0.0, **more: object) -> DriftTensor:
    figures = {key: DriftFigure(value=loss if key == "sqnr_loss_db" else 0.5, level="ok") for key in NAMES}
    figures["sqnr_loss_db"] = DriftFigure(value=loss, level=level, null=0.2)
    return DriftTensor(
        tensor=name,
        layer=f"node of {name}",
        level=level,
        figures=figures,
        calibration_sqnr_db=40.0,
        production_sqnr_db=40.0 - loss,
        saturation_interval=(0.0, 0.03),
        clipped_energy_ratio=0.0,
        absmax_ratio=2.0,
        psi=0.3,
        psi_null=0.01,
        jensen_shannon_bits=0.1,
        dead_codes=0.3,
        alive_channels=[1],
        calibration_shares=[0.5, 0.4, 0.1, 0.0],
        production_shares=[0.4, 0.3, 0.2, 0.1],
        **more,
    )


def report(name: str = "a", advice: str = "do this") -> Report:
    common = {"requests": 9, "worst_sqnr_loss_db": 9.0, "worst_saturation": 0.2}
    drift = Drift(
        level="fail",
        calibration="table.json",
        production="p.stats",
        calibration_requests=64,
        production_requests=99,
        focus=f"slice {name}",
        cause=name,
        consequences=["b"],
        histogram_edges=[0.0, 63.5, 127.0, 180.0, 254.0],
        tensors=[tensor("first"), tensor(name, "fail", 9.0), tensor("b", "warn", 4.0)],
        slices=[
            DriftSlice(name=name, level="fail", cause=name, drifting=2, requests_needed=12, **common),
            DriftSlice(name="few", level="ok", judged=False, **common),
        ],
        worst_requests=[DriftRequest(request=name, slice=name, tensor=name, noise_ratio=float("inf"))],
        timeline=[
            DriftDay(date=f"2026-01-0{d}", level="ok" if d < 3 else "fail", **common) for d in range(1, 5)
        ],
        began="2026-01-03",
        costs=[
            DriftCost(
                layer=name, tensor=name, level="fail", calibration_sqnr_db=30.0, production_sqnr_db=20.0
            ),
            DriftCost(layer="x", tensor="b", level="ok", production_sqnr_db=20.0),
        ],
        costs_agree=True,
        costs_sentence=advice,
        advice=[
            DriftAdvice(
                action="recalibrate", text=advice, tensors=[name], requests=[name], gain_db=12.0, command=name
            )
        ],
    )
    run = RunInfo(
        command="trtdiag drift",
        engine="none",
        versions={},
        batches=1,
        samples=9,
        seconds=1.0,
        peak_memory_mb=1.0,
        started="now",
    )
    finding = Finding(id="drift-1", kind="drift", severity="error", layers=[name], title=name)
    model = ModelInfo(path="m.onnx", sha256="0" * 64, opset=17, node_count=3)
    return Report(model=model, run=run, verdict=f"Drift begins at {name}.", findings=[finding], drift=drift)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.seen


def test_hostile_names_stay_text() -> None:
    seen = tags(render_html(report(HOSTILE, HOSTILE)))
    assert "img" not in [tag for tag, _ in seen]
    assert [tag for tag, _ in seen].count("script") == 1
    assert not [a for _, attributes in seen for a in attributes if a.startswith("on") or a == "style"]


def test_nothing_is_loaded() -> None:
    for tag, attributes in tags(render_html(report())):
        for name in ("src", "href"):
            value = attributes.get(name) or "#"
            assert value.startswith("#") or value == "data:,", (tag, value)


def test_every_picture_and_table_has_a_name() -> None:
    seen = tags(render_html(report()))
    assert [a for tag, a in seen if tag == "svg" and not a.get("aria-label")] == []
    tables = [a.get("id") for tag, a in seen if tag == "table"]
    assert {"t-drift", "t-slices", "t-days", "t-requests", "t-costs"} <= set(tables)
    assert len(tables) == len(set(tables))
    ids = [a["id"] for _, a in seen if a.get("id")]
    assert len(ids) == len(set(ids))
    links = [str(a["href"])[1:] for tag, a in seen if tag == "a"]
    assert set(links) <= set(ids)


def test_the_cause_comes_first_and_the_clip_edge_is_where_the_range_ends() -> None:
    drift = report().drift
    assert drift is not None
    assert [t.tensor for t in ranked(drift)] == ["a", "b", "first"]
    view = drift_view(drift)
    picture = view.rows[0].picture
    assert picture is not None
    assert picture.clip_x == pytest.approx(100)  # two of four bins end at 127
    heights = [float(y) for y in re.findall(r"V([\d.]+)H", picture.production)]
    assert heights == sorted(heights)  # rarer bins are lower: y grows downwards
    assert view.timeline is not None
    assert [day.tone for day in view.timeline.days] == ["ok", "ok", "bad", "bad"]


def test_a_report_survives_its_file() -> None:
    text = dumps(report())
    assert dumps(loads(text, "x")) == text


def test_the_summary_says_what_matters() -> None:
    from rich.console import Console

    console = Console(width=100, color_system=None, record=True)
    with console.capture() as capture:
        console.print(drift_summary(report("/block.1/Mul_output_0"), 100, ["out/report.html"]))
    text = capture.get()
    for words in ("DRIFT", "2026-01-03", "few", "too few requests", "+12.0 dB", "out/report.html"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100
    hostile = Console(width=100, color_system=None)
    with hostile.capture() as capture:
        hostile.print(drift_summary(report("\x1b[31m", "\x1b]0;x"), 100))
    assert "\x1b" not in capture.get()
