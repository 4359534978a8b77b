"""A benchmark on the terminal, and as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import typer

from memtrain.cli.measure.bench import Bench, Row
from memtrain.cli.output.terminal import print_table, say
from memtrain.cli.plan.html import STYLE
from memtrain.memory.plan.units import gib

HEADERS = ("variant", "peak", "predicted", "off", "resident", "tokens/s", "of plain", "loss differs by")


def print_bench(made: Bench) -> None:
    """The waterfall, what each strategy is worth in the whole plan, and the other recipe."""
    say(heading(made))
    for title, rows in sections(made):
        typer.echo()
        say(title)
        print_table(HEADERS, table(rows, made.rows[0]))
    typer.echo()
    say(NOTE)


NOTE = (
    "Peak: live tensors on the device, in steps with the heaviest micro-batch of the data among them; "
    "predicted: the same, by the plan; resident: the process above its imports. Tokens/s: the median of the "
    "repetitions, and their spread. The loss is compared with that of the first row, on the same rows in the "
    "same order."
)


def heading(made: Bench) -> str:
    """Subject, device and repetitions of the measurements."""
    return (
        f"{made.method}: {made.recipe} on {made.device}; {made.steps} timed steps, {made.repeats} times in "
        "turns, each in a process of its own"
    )


def sections(made: Bench) -> list[tuple[str, Sequence[Row]]]:
    """The tables that have rows, each with its title."""
    found = (
        ("From the plain run to the plan, one strategy at a time", made.rows),
        ("The plan without each of them", made.ablations),
        ("Against", made.against),
    )
    return [(title, rows) for title, rows in found if rows]


def table(rows: Sequence[Row], first: Row) -> list[tuple[str, ...]]:
    """The rows as text; `first` is what speeds are told as a share of."""
    return [_cells(row, first) for row in rows]


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    if row.peak_bytes is None or row.tokens_per_s is None:
        return (row.name, "not measured", gib(row.predicted_bytes), "", "", "", "", row.fault)
    off = row.predicted_bytes / row.peak_bytes - 1 if row.peak_bytes else 0.0
    share = f"{row.tokens_per_s / first.tokens_per_s:.2f}" if first.tokens_per_s else ""
    spread = f"{min(row.tokens_per_s_all):,.0f}-{max(row.tokens_per_s_all):,.0f}"
    speed = (
        f"{row.tokens_per_s:,.0f} ({spread})" if len(row.tokens_per_s_all) > 1 else f"{row.tokens_per_s:,.0f}"
    )
    differs = "" if row.loss_difference is None else f"{row.loss_difference:.1e}"
    resident = gib(row.rss_bytes or 0)
    return (
        row.name,
        gib(row.peak_bytes),
        gib(row.predicted_bytes),
        f"{off:+.0%}",
        resident,
        speed,
        share,
        differs,
    )


def page(made: Bench) -> str:
    """The whole page; it loads nothing from anywhere."""
    title = heading(made)
    widest = max([row.peak_bytes or row.predicted_bytes for _, rows in sections(made) for row in rows])
    parts = [f"<h1>{escape(title)}</h1>"]
    for name, rows in sections(made):
        parts.append(f"<h2>{escape(name)}</h2>")
        parts.append(_bars(rows, made.rows[0], widest))
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    parts += [f"<p>{escape(NOTE)}</p>", f"<p>{escape(versions)}</p>"]
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def _bars(rows: Sequence[Row], first: Row, widest: int) -> str:
    """A table with a bar for each peak, and a line where it was predicted."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (*HEADERS, "peak, and predicted (light)"))
    lines: list[str] = []
    for row, cells in zip(rows, table(rows, first), strict=True):
        measured = (row.peak_bytes or 0) / max(1, widest)
        predicted = row.predicted_bytes / max(1, widest)
        bars = (
            f'<div class=bar><span style="width:{min(1.0, measured):.2%};background:#3b6ea8"></span></div>'
            f'<div class=bar style="height:.35rem">'
            f'<span style="width:{min(1.0, predicted):.2%};background:#9db8d6"></span></div>'
        )
        text = "".join(f"<td class=n>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr>{text}<td style="width:25%">{bars}</td></tr>')
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
