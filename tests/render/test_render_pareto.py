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


def test_labels_of_near_marks_do_not_lie_on_each_other() -> None:
    picture = drawn(*[("candidate", n, 30.0 + n / 100, 1.0) for n in range(6)])
    heights = sorted(mark.label_y for mark in picture.marks)
    assert all(b - a >= 14 for a, b in itertools.pairwise(heights))


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
