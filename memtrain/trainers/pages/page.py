"""Rendering of a page: a template on the common base, with the filters that all pages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from memtrain.memory.plan.units import gib

COMMON = Path(__file__).parent / "templates"
"""Style, layout and the macros of tables, tiles and figures."""


def standalone(drawn: str) -> str:
    """An SVG of `charts.py` or `scatter.py` as a file of its own, with the colours of light and of dark."""
    style = _environment(COMMON).get_template("chart.css.j2").render()
    opened, _, rest = drawn.partition(">")
    size = " ".join(opened.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    width, _, height = size.partition(" ")
    font = 'font-family="system-ui, sans-serif"'
    named = opened.replace(
        "<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {font} ', 1
    )
    ground = '<rect width="100%" height="100%" fill="var(--card)"/>'
    return f"{named}><style>{style}</style>{ground}{rest}"


def render(template: Path, **values: Any) -> str:
    """The page of `template` (it extends `base.html.j2`), as text; whatever is written in it is escaped.

    An SVG of `charts.py` goes through the filter `svg`; bytes through `gib`, counts through `num`.
    """
    return _environment(template.parent, COMMON).get_template(template.name).render(**values)


def _environment(*folders: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib, "svg": Markup, "num": lambda value: f"{value:,}"}
    return environment
