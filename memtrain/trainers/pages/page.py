"""Rendering of a page: a template on the common base, with the filters that all pages share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from memtrain.memory.plan.units import gib, signed
from memtrain.trainers.pages.charts import LETTER

LEGEND_ROOM = 24
COMMON = Path(__file__).parent / "templates"
"""Style, layout and the macros of tables, tiles and figures."""


def standalone(drawn: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """An SVG of `charts.py` or `scatter.py` as a file of its own, with the colours of light and of dark.

    `legend`: name and CSS class of each line or part, in a row above the chart.
    """
    style = _environment(COMMON).get_template("chart.css.j2").render()
    opened, _, rest = drawn.partition(">")
    before, _, box = opened.partition('viewBox="0 0 ')
    size, _, after = box.partition('"')
    width, height = map(int, size.split())
    room, x, row = (LEGEND_ROOM if legend else 0), 4.0, ""
    for name, colour in legend:
        row += f'<rect class="fill {colour}" x="{x:.0f}" y="4" width="11" height="11"/>'
        row += f'<text x="{x + 16:.0f}" y="14">{escape(name)}</text>'
        x += 34 + LETTER * len(name)
    shape = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + room}"'
    named = f'<svg {shape} font-family="system-ui, sans-serif" {before.removeprefix("<svg ")}'
    ground = '<rect width="100%" height="100%" fill="var(--card)"/>'
    moved = f'<g transform="translate(0 {room})">{rest.removesuffix("</svg>")}</g>'
    opened = f'{named}viewBox="0 0 {width} {height + room}"{after}>'
    return f"{opened}<style>{style}</style>{ground}{row}{moved}</svg>"


def render(template: Path, **values: Any) -> str:
    """The page of `template` (it extends `base.html.j2`), as text; whatever is written in it is escaped.

    An SVG of `charts.py` goes through the filter `svg`; bytes through `gib`, counts through `num`,
    differences through `signed`.
    """
    return _environment(template.parent, COMMON).get_template(template.name).render(**values)


@cache
def _environment(*folders: Path) -> Environment:
    """Environment of the process: a template is compiled once, however often a page is written."""
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib, "svg": Markup, "num": lambda value: f"{value:,}", "signed": signed}
    return environment


def framed(page: str) -> str:
    """A page in a frame of its own, as notebooks show it."""
    text = page.replace("&", "&amp;").replace('"', "&quot;")
    return f'<iframe srcdoc="{text}" width="100%" height="700" style="border:0"></iframe>'
