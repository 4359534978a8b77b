"""The answer of `memtrain inspect-lengths` as one page that needs nothing beside itself."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from memtrain.memory.plan.units import gib
from memtrain.trainers.data.length_report.format import SHOWN, count_of, share, short
from memtrain.trainers.data.length_report.result import Inspection

TEMPLATES = Path(__file__).parent / "templates"


def page(found: Inspection) -> str:
    """The HTML of the page; its script draws from the same JSON that --json prints."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib, "short": short, "num": lambda value: f"{value:,}"}
    environment.globals |= {"share": share, "count_of": count_of}
    return environment.get_template("inspect.html.j2").render(
        found=found, tiles=tiles(found), json=script_safe(found.model_dump_json()), shown=SHOWN
    )


def script_safe(json: str) -> Markup:
    """JSON that may stand inside a script element: no `<` of it can end the element."""
    return Markup(json.replace("<", "\\u003c"))


def tiles(found: Inspection) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the figures at the top."""
    row = found.distributions[0]
    about = "about " if found.extent.is_estimate else ""
    points = {point.percent: point.tokens for point in row.percentiles}
    made = [
        ("rows", about + short(found.rows), f"{found.format.replace('_', '-')}, for {found.method}"),
        ("tokens", about + short(found.tokens), f"{row.mean:,.1f} a row"),
    ]
    if found.learnt:
        part = share(found.learnt, found.tokens)
        made.append(("loss tokens", about + short(found.learnt), f"{part} of all"))
    most = f"95%: {points[95.0]:,}, 99%: {points[99.0]:,}"
    made.append(("median", f"{points[50.0]:,} tokens", most))
    longest = Path(found.longest[0].where).name if found.longest else ""
    made.append(("longest row", f"{row.largest:,}", longest))
    made.append(("duplicates", f"{found.duplicates:,}", share(found.duplicates, found.rows)))
    bad = found.faulty
    which = f"{bad.empty:,} empty, {bad.unlearnt:,} without a loss token" if bad.rows else "no bad rows"
    made.append(("bad rows", f"{bad.rows:,}", which))
    return made
