"""The results as one HTML file with its plots inside: nothing is fetched when it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from first_light.published import beside
from first_light.summary import plans, traced_error

Record = Mapping[str, Any]
WIDTH, ROW = 900, 22
STYLE = (
    "body{font:14px system-ui;margin:2em auto;max-width:60em}td,th{padding:.2em .6em;text-align:left;"
    "border-bottom:1px solid #ddd;vertical-align:top}code{white-space:pre-wrap}.bad{color:#a00}"
)


def page(found: Mapping[str, Record], summed: Mapping[str, Any]) -> str:
    """The whole page."""
    groups = list(dict.fromkeys(name.partition("/")[0] for name in found))
    parts = [
        "<h1>First light</h1>",
        f"<p>{escape(head(summed))}</p>",
        "<h2>The planner</h2>",
        error_plot(found),
        "<h2>Tokens a second</h2>",
        speed_plot(found),
        *(part for group in groups for part in section(group, found)),
    ]
    title = "<!doctype html><meta charset=utf-8><title>memtrain: first light</title>"
    return f"{title}<style>{STYLE}</style>\n" + "\n".join(parts) + "\n"


def head(summed: Mapping[str, Any]) -> str:
    """Where it was measured, and how far the ladder came."""
    where, plan = summed["where"], summed["plan"]
    error = "not measured" if plan["median_error"] is None else f"{plan['median_error']:.1%}"
    worst = "" if plan["worst_error"] is None else f", worst {plan['worst_error']:+.1%}"
    return (
        f"{where.get('device')}, {where.get('date')}, commit {where.get('commit')}: {summed['done']} of "
        f"{summed['stages']} stages, {len(summed['faults'])} faults. Planned over measured peak: median "
        f"error {error}{worst}, {len(plan['false_fits'])} false fits."
    )


def section(group: str, found: Mapping[str, Record]) -> list[str]:
    """A table of the stages of a group, with what others have published."""
    rows = [row for name, one in found.items() if name.partition("/")[0] == group for row in _rows(name, one)]
    return [f"<h2>{escape(group)}</h2>", "<table>", *rows, "</table>"]


def _rows(name: str, one: Record) -> Iterable[str]:
    kind = next((key for key in ("fault", "refused", "skipped") if key in one), "")
    text = f"{kind}: {one[kind]}" if kind else str(one.get("words", ""))
    style = ' class="bad"' if kind == "fault" else ""
    yield f"<tr><td>{escape(name)}</td><td{style}>{escape(text)}</td><td>{one.get('seconds', '')} s</td></tr>"
    for record in beside(name):
        figures = [
            f"{record.tokens_per_s:,.0f} tokens/s" if record.tokens_per_s else "",
            f"{record.tokens:,} tokens" if record.tokens else "",
            f"{record.gib:g} GiB" if record.gib else "",
        ]
        told = f"{record.what}: {', '.join(one for one in figures if one)}"
        yield f"<tr><td>&nbsp;&nbsp;{escape(record.who)}</td><td>{escape(told)}</td><td></td></tr>"


def error_plot(found: Mapping[str, Record]) -> str:
    """Each plan's error as a bar around zero, with its trace's as a mark."""
    rows = [(name, one["planned_error"], traced_error(one)) for name, one in plans(found)]
    if not rows:
        return "<p>No plan was measured.</p>"
    most = max(0.05, *(abs(value) for _, plan, trace in rows for value in (plan, trace or 0.0)))
    middle, scale = 560.0, 300.0 / most
    lines: list[str] = [f'<line x1="{middle}" y1="0" x2="{middle}" y2="{ROW * len(rows)}" stroke="#888"/>']
    for number, (name, plan, trace) in enumerate(rows):
        y = ROW * number
        start, width = middle + min(0.0, plan) * scale, abs(plan) * scale
        lines.append(f'<text x="0" y="{y + 15}">{escape(name[:62])}</text>')
        lines.append(
            f'<rect x="{start:.1f}" y="{y + 4}" width="{max(1, width):.1f}" height="13" fill="#48c"/>'
        )
        if trace is not None:
            x = middle + trace * scale
            lines.append(f'<circle cx="{x:.1f}" cy="{y + 10}" r="4" fill="#c40"/>')
        lines.append(f'<text x="{WIDTH - 60}" y="{y + 15}">{plan:+.1%}</text>')
    caption = "Bars: planned over measured peak, less 1. Marks: the trace's."
    return _svg(lines, len(rows)) + f"<p>{caption}</p>"


def speed_plot(found: Mapping[str, Record]) -> str:
    """Tokens a second of each speed stage, with what others have published beside it."""
    bars: list[tuple[str, float, str]] = []
    for name, one in found.items():
        if name.startswith("speed/") and one.get("tokens_per_s"):
            bars.append((name, one["tokens_per_s"], "#48c"))
            bars += [(f"  {r.who}: {r.what}", r.tokens_per_s, "#bbb") for r in beside(name) if r.tokens_per_s]
    if not bars:
        return "<p>No speed was measured.</p>"
    most = max(value for _, value, _ in bars)
    lines: list[str] = []
    for number, (name, value, colour) in enumerate(bars):
        y = ROW * number
        lines.append(f'<text x="0" y="{y + 15}">{escape(name[:62])}</text>')
        lines.append(
            f'<rect x="420" y="{y + 4}" width="{400 * value / most:.1f}" height="13" fill="{colour}"/>'
        )
        lines.append(f'<text x="{WIDTH - 70}" y="{y + 15}">{value:,.0f}</text>')
    return _svg(lines, len(bars))


def _svg(lines: Sequence[str], rows: int) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {ROW * rows}" width="{WIDTH}" font-size="12" font-family="monospace">'
    return head + "".join(lines) + "</svg>"
