"""Report to one HTML file that needs nothing else: no network, no fonts, no framework.

The template places cells and escapes every one of them. Style and script are ours, inlined, and allowed
by their hashes: the page's Content-Security-Policy lets nothing else run or load.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from diag.render import picture
from diag.render.view import page
from diag.report.schema import Report
from diag.resources import data_dir


@dataclass(frozen=True, slots=True)
class Box:
    """Where the picture's parts are, in its own units."""

    width: float = picture.WIDTH
    height: float = picture.HEIGHT
    left: float = picture.LEFT
    right: float = picture.RIGHT
    top: float = picture.TOP
    bottom: float = picture.BOTTOM
    exact: float = picture.EXACT_Y
    broken: float = picture.BROKEN_Y
    unseen: float = picture.UNSEEN_Y
    block: float = picture.BLOCK_Y


@dataclass(frozen=True, slots=True)
class Inline:
    """A trusted file of ours as it stands in the page, and the hash by which the page's policy allows it."""

    text: Markup
    policy_hash: str


def _breakable(text: str) -> Markup:
    """Escaped text that may break after slashes, so that long node names break between their parts."""
    # What escaping writes holds no slash, so only the text's own slashes are found.
    escaped = str(escape(text))
    return Markup(escaped[:1] + escaped[1:].replace("/", "/<wbr>"))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(data_dir("reports")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


@functools.cache
def _inline(name: str) -> Inline:
    text = (data_dir("reports") / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Inline(Markup(text), f"sha256-{digest}")


def render_html(report: Report) -> str:
    """The report as a page that is readable offline, on paper and without scripts."""
    style, script = _inline("report.css"), _inline("report.js")
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            page=page(report),
            box=Box(),
            style=style.text,
            style_hash=style.policy_hash,
            script=script.text,
            script_hash=script.policy_hash,
        )
    )
