"""Rendering of a page: a template on the common base, with the filters that all pages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from memtrain.memory.plan.units import gib

COMMON = Path(__file__).parent / "templates"
"""Style, layout and the macros of tables, tiles and figures."""


def render(template: Path, **values: Any) -> str:
    """The page of `template` (it extends `base.html.j2`), as text; whatever is written in it is escaped.

    An SVG of `charts.py` goes through the filter `svg`; bytes through `gib`, counts through `num`.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, COMMON]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib, "svg": Markup, "num": lambda value: f"{value:,}"}
    return environment.get_template(template.name).render(**values)
