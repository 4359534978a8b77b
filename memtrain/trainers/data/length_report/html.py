"""The answer of `memtrain inspect-lengths` as one page that needs nothing beside itself."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from memtrain.trainers.data.length_report.format import SHOWN, share, short
from memtrain.trainers.data.length_report.result import Distribution, Inspection
from memtrain.trainers.pages.charts import Figure, for_both_widths, histogram
from memtrain.trainers.pages.page import render

TEMPLATES = Path(__file__).parent / "templates"
MARKED = {50.0: "median", 95.0: "95%", 99.0: "99%"}
"""Percentiles that are marked in a chart."""


def page(found: Inspection) -> str:
    """The HTML of the page; its script draws from the same JSON that --json prints."""
    return render(
        TEMPLATES / "inspect.html.j2",
        found=found,
        tiles=tiles(found),
        charts=[(one, _chart(one)) for one in found.distributions],
        json=script_safe(found.model_dump_json()),
        share=share,
        short=short,
        shown=SHOWN,
    )


def _chart(one: Distribution) -> Figure:
    """Rows by length, with the shares of the rows that end at some of them."""
    bins = [(bar.first, bar.last, bar.rows) for bar in one.bins]
    marks = [(name, point.tokens) for point in one.percentiles if (name := MARKED.get(point.percent))]
    title = f"Rows by {one.name}"
    return for_both_widths(
        title,
        lambda is_narrow: histogram(bins, title, marks=marks, unit=one.unit, height=280, is_narrow=is_narrow),
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
    if found.loss_tokens:
        part = share(found.loss_tokens, found.tokens)
        made.append(("loss tokens", about + short(found.loss_tokens), f"{part} of all"))
    most = f"95%: {points[95.0]:,}, 99%: {points[99.0]:,}"
    made.append(("median", f"{points[50.0]:,} tokens", most))
    longest = Path(found.longest[0].where).name if found.longest else ""
    made.append(("longest row", f"{row.largest:,}", longest))
    made.append(("duplicates", f"{found.duplicates:,}", share(found.duplicates, found.rows)))
    bad = found.faulty
    named = ((bad.empty, "empty"), (bad.without_loss_tokens, "without a loss token"))
    which = ", ".join(f"{count:,} {word}" for count, word in named if count)
    made.append(("bad rows", f"{bad.rows:,}", which or (bad.kinds[0].where if bad.rows else "no bad rows")))
    return made
