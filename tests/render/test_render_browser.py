"""The page in a real browser, offline: it works, stays quiet, and a hostile name stays text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import make_sample
import pytest
from make_sample import HOSTILE

from diag.files import write_text
from diag.render.html import render_html
from diag.report.schema import Report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_ROWS = "#t-layers tbody tr:visible"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a report offline; afterwards no error, dialog or request may have been seen."""
    trouble: list[str] = []
    contexts = []

    def go(report: Report, **options: object) -> Page:
        path = tmp_path / "report.html"
        write_text(render_html(report), path)
        context = browser.new_context(offline=True, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("request", lambda request: _request(request.url, path, trouble))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(path.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert trouble == []


def _request(url: str, path: Path, trouble: list[str]) -> None:
    if not url.startswith((path.as_uri(), "data:,")):
        trouble.append(f"request: {url}")


def _column(page: Page, number: int) -> list[str]:
    return page.locator(f"#t-layers tbody tr > :nth-child({number})").all_inner_texts()


def test_hostile_names_stay_inert(visit: Callable[..., Page], hostile: Report) -> None:
    page = visit(hostile)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert page.locator("#L1 th").inner_text().startswith(HOSTILE)
    assert HOSTILE in (page.locator("svg title").first.text_content() or "")


def test_sorts_by_number_with_missing_values_last(visit: Callable[..., Page], sample: Report) -> None:
    page = visit(sample)
    head = page.locator("#t-layers th", has_text="Accumulated")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    texts = _column(page, 7)
    assert texts[0] == "−∞"
    assert texts[-4:] == ["exact", "—", "—", "—"]
    numbers = [float(text) for text in texts[1:-4]]
    assert numbers == sorted(numbers)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    texts = _column(page, 7)
    assert texts[0] == "exact"
    assert texts[-3:] == ["—", "—", "—"]


def test_sorts_names_as_people_count(visit: Callable[..., Page], sample: Report) -> None:
    names = ["/b.10/x", "/b.9/x", "/a/z/y", "/b.9"]
    layers = [sample.layers[0].model_copy(update={"name": name, "source": name}) for name in names]
    page = visit(sample.model_copy(update={"layers": layers, "births": []}))
    page.locator("#t-layers th[scope=col]", has_text="Layer").get_by_role("button").click()
    shown = [text.split("\n")[0] for text in _column(page, 2)]
    assert shown == ["/a/z/y", "/b.9", "/b.9/x", "/b.10/x"]


def test_sorts_from_the_keyboard(visit: Callable[..., Page], sample: Report) -> None:
    page = visit(sample)
    page.locator("#t-layers th", has_text="Role").get_by_role("button").focus()
    page.keyboard.press("Enter")
    roles = _column(page, 3)
    assert roles == sorted(roles)


def test_filters_and_search(visit: Callable[..., Page], sample: Report) -> None:
    page = visit(sample)
    page.get_by_label("Role").select_option("pv_matmul")
    assert page.locator(_ROWS).count() == 4
    page.get_by_role("searchbox").fill("blocks.1")
    assert page.locator(_ROWS).count() == 1
    assert page.locator("#layers output").inner_text() == "1 of 60 layers"
    page.get_by_role("button", name="Clear").click()
    assert page.locator(_ROWS).count() == 60
    page.get_by_label("Format").select_option("int8")
    assert set(_visible(page, 6)) == {"int8"}
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Status").select_option("not observable")
    assert page.locator(_ROWS).count() == 2


def _visible(page: Page, number: int) -> list[str]:
    return page.locator(f"{_ROWS} > :nth-child({number})").all_inner_texts()


def test_a_link_leads_to_a_row_that_is_filtered_away(visit: Callable[..., Page], sample: Report) -> None:
    page = visit(sample)
    page.get_by_label("Role").select_option("norm")
    page.locator("#birth-1 h3 a").click()
    assert page.locator("tr:target").is_visible()


def test_readable_without_scripts(visit: Callable[..., Page], with_layers: Callable[..., Report]) -> None:
    layers = make_sample.layers(blocks=40)
    page = visit(with_layers(*layers), java_script_enabled=False)
    assert page.locator(_ROWS).count() == len(layers)
    assert len(layers) > 400
    assert page.locator(".controls").is_hidden()


def test_many_layers_are_shown_on_demand_and_all_are_sorted(
    visit: Callable[..., Page], with_layers: Callable[..., Report]
) -> None:
    layers = make_sample.layers(blocks=540)
    page = visit(with_layers(*layers))
    assert page.locator(_ROWS).count() == 400
    page.locator("#t-layers th", has_text="Accumulated").get_by_role("button").click()
    page.wait_for_selector("#t-layers [aria-sort=ascending]")
    assert _visible(page, 2)[0].startswith("/decoder/Log"), "found beyond the first rows"
    page.get_by_role("searchbox").fill("/blocks.539/attn/pv/")
    assert page.locator(_ROWS).count() == 1


@pytest.mark.parametrize("width", [400, 1280])
def test_never_scrolls_sideways_as_a_whole(visit: Callable[..., Page], sample: Report, width: int) -> None:
    page = visit(sample, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_paper_unfolds_everything(visit: Callable[..., Page], sample: Report) -> None:
    page = visit(sample)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
