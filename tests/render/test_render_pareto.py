"""The picture of a search: who is on the frontier, where marks stand, and what is said of each plan."""

from __future__ import annotations

import itertools
import math

import pytest

from diag.render.html import render_html
from diag.render.pareto import BOTTOM, LEFT, RIGHT, TOP, Pareto, pareto
from diag.report.schema import Report, SearchInfo, SearchPoint


def drawn(*points: tuple[str, int, float, float], higher: bool = True, bound: float = 30.0) -> Pareto:
    made = [
        SearchPoint(label=f"{k} {n}", kind=k, pins=n, value=v, price=p, met=v >= bound)  # type: ignore[arg-type]
        for k, n, v, p in points
    ]
    info = SearchInfo(
        target=f"sqnr_db>={bound:g}",
        metric="sqnr_db",
        bound=bound,
        higher_is_better=higher,
        measured_prices=False,
        prices="an estimate",
        points=made,
    )
    found = pareto(info)
    assert found is not None
    return found


def test_marks_stand_by_price_and_value() -> None:
    picture = drawn(("start", 0, 20.0, 1.0), ("chosen", 3, 31.0, 1.1), ("rival", 0, 60.0, 0.7))
    by_kind = {mark.kind: mark for mark in picture.marks}
    assert by_kind["rival"].x < by_kind["start"].x < by_kind["chosen"].x
    assert by_kind["rival"].y < by_kind["chosen"].y < by_kind["start"].y  # SVG counts downwards
    assert picture.target_y is not None
    assert by_kind["chosen"].y < picture.target_y < by_kind["start"].y
    assert all(LEFT <= m.x <= RIGHT and TOP <= m.y <= BOTTOM for m in picture.marks)


def test_a_dominated_plan_is_not_on_the_frontier() -> None:
    alone = drawn(("rival", 0, 60.0, 0.7))
    with_worse = drawn(("rival", 0, 60.0, 0.7), ("chosen", 3, 31.0, 1.1))
    assert "H" not in alone.frontier
    assert "H" not in with_worse.frontier
    assert drawn(("start", 0, 20.0, 1.0), ("chosen", 3, 31.0, 1.1)).frontier.count("H") == 1


def test_where_less_is_better_the_frontier_turns_round() -> None:
    points = (("start", 0, 0.9, 1.0), ("chosen", 3, 0.2, 1.1))
    assert drawn(*points, higher=False, bound=0.3).frontier.count("H") == 1
    assert drawn(*points, higher=True, bound=0.3).frontier.count("H") == 0


def test_values_that_are_not_finite_lie_at_the_bottom_and_are_called_so() -> None:
    picture = drawn(("start", 0, -math.inf, 1.0), ("chosen", 3, 31.0, 1.1))
    lost = next(m for m in picture.marks if m.kind == "start")
    assert lost.y == BOTTOM
    assert "not finite" in lost.title


@pytest.mark.parametrize("value", [30.0, 60.0])
def test_labels_of_near_marks_do_not_lie_on_each_other(value: float) -> None:
    """Also where the marks crowd at the lower end, under the one at 90."""
    crowd = [("rival", n, value + n / 100, 1.0) for n in range(6)]
    picture = drawn(*crowd, ("chosen", 1, 90.0, 1.0))
    heights = sorted(mark.label_y for mark in picture.marks)
    assert all(b - a >= 14 for a, b in itertools.pairwise(heights))
    assert heights[-1] <= BOTTOM
    assert any(mark.lead for mark in picture.marks)


def test_numbers_above_other_sets_do_not_lie_on_each_other() -> None:
    close = drawn(
        *[("candidate", n, 30.0 + n / 100, 1.0 + n / 1e4) for n in range(6)], ("rival", 0, 90.0, 0.5)
    )
    shown = [mark for mark in close.marks if mark.kind == "candidate" and mark.label]
    assert [mark.label for mark in shown] == ["0"]
    assert len(close.table.rows) == 7  # the table has them all
    apart = drawn(*[("candidate", n, 30.0, 1.0 + n) for n in range(6)])
    assert [mark.label for mark in apart.marks] == list("012345")


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("sqnr_db", "SQNR, dB (higher is better)"),
        ("cosine", "Cosine (higher is better)"),
        ("kl", "KL, nats (lower is better)"),
        ("accuracy", "accuracy (higher is better)"),
    ],
)
def test_the_axis_names_the_metric_its_unit_and_its_better_side(metric: str, title: str) -> None:
    points = [SearchPoint(label="a", kind="chosen", pins=1, value=0.5, price=1, met=True)]
    info = SearchInfo(
        target="t",
        metric=metric,
        bound=0.4,
        higher_is_better=metric != "kl",
        measured_prices=True,
        prices="measured",
        points=points,
    )
    picture = pareto(info)
    assert picture is not None
    assert picture.y_title == title
    assert picture.x_title == "time over that of the plan without pins, measured (left is better)"


def test_nothing_is_drawn_without_a_search(sample: Report) -> None:
    assert pareto(None) is None
    assert pareto(SearchInfo.model_validate(sample.search.model_dump() | {"points": []})) is None  # type: ignore[union-attr]
    page = render_html(sample.model_copy(update={"search": None}))
    assert 'id="search"' not in page


def test_the_page_shows_the_search_and_says_that_prices_are_estimated(sample: Report) -> None:
    page = render_html(sample)
    assert 'id="search"' in page
    assert "everything in FP16" in page
    assert "estimated (left is better)" in page
    assert "not measured" in page


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_axes_take_any_scale(scale: float) -> None:
    picture = drawn(
        ("start", 0, 1.0 * scale, scale), ("chosen", 1, 3.0 * scale, 2 * scale), bound=2.0 * scale
    )
    assert 3 <= len(picture.y_ticks) <= 12
    assert 3 <= len(picture.x_ticks) <= 12
