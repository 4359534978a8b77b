"""A benchmark on the terminal, and as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from memtrain.cli.measure.bench import Bench, Row
from memtrain.cli.output.terminal import print_table, print_text
from memtrain.memory.plan.units import count_of, gib, signed
from memtrain.trainers.pages.charts import Bar, Figure, bar_chart, for_both_widths
from memtrain.trainers.pages.memory_bars import memory_unit
from memtrain.trainers.pages.page import render

TEMPLATE = Path(__file__).parent / "templates" / "bench.html.j2"
HEADERS = ("variant", "peak", "predicted", "off", "resident", "tokens/s", "plain = 1", "loss differs by")


def print_bench(made: Bench) -> None:
    """The waterfall, the worth of each strategy in the whole plan, and the other recipe."""
    print_text(heading(made))
    for title, rows in sections(made):
        typer.echo()
        print_text(title)
        print_table(HEADERS, table(rows, made.rows[0]))
    typer.echo()
    print_text(NOTE)


NOTE = (
    "Peak: live tensors on the device, in steps that include the heaviest micro-batch of the data; "
    "predicted: the same, by the plan; resident: memory of the process beyond its imports. Tokens/s: the "
    "median of the repetitions, and their spread. The loss is compared with that of the first row, on the "
    "same rows in the same order."
)


def heading(made: Bench) -> str:
    """Subject, device and repetitions of the measurements."""
    times = "once" if made.repeats == 1 else f"{made.repeats} times each, in turns"
    steps = count_of(made.steps, "timed step")
    return f"{made.method}: {made.recipe} on {made.device}; {steps}, {times}, each in its own process"


def sections(made: Bench) -> list[tuple[str, Sequence[Row]]]:
    """The tables that have rows, each with its title."""
    found = (
        ("From the plain run to the plan, one strategy at a time", made.rows),
        ("The plan without each strategy", made.ablations),
        ("Against", made.against),
    )
    return [(title, rows) for title, rows in found if rows]


def table(rows: Sequence[Row], first: Row) -> list[tuple[str, ...]]:
    """The rows as text; `first` is the base of the speeds' shares."""
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
    differs = (
        "" if row.loss_difference is None else f"{row.loss_difference:.1e}" if row.loss_difference else "0"
    )
    resident = gib(row.rss_bytes or 0)
    return (
        row.name,
        gib(row.peak_bytes),
        gib(row.predicted_bytes),
        signed(off, 0),
        resident,
        speed,
        share,
        differs,
    )


def page(made: Bench) -> str:
    """The whole page, which loads nothing from anywhere."""
    return render(
        TEMPLATE,
        title=f"{made.method}: {made.recipe}",
        how=heading(made).partition(f"{made.recipe} ")[2],
        sections=[(name, _peaks(rows), table(rows, made.rows[0])) for name, rows in sections(made)],
        headers=HEADERS,
        note=NOTE,
        versions=", ".join(f"{name} {version}" for name, version in made.versions.items()),
    )


def _peaks(rows: Sequence[Row]) -> Figure:
    """Two bars for each row: the peak as measured, and as predicted."""
    bars: list[Bar] = []
    for row in rows:
        if row.peak_bytes is not None:
            bars.append(Bar(row.name, [("measured", row.peak_bytes, "c1")], gib(row.peak_bytes)))
        label = row.name if row.peak_bytes is None else ""
        predicted = [("predicted", float(row.predicted_bytes), "faint")]
        bars.append(Bar(label, predicted, gib(row.predicted_bytes)))
    longest = max((length for bar in bars for _, length, _ in bar.parts), default=0.0)
    title, unit = "Peaks, measured and predicted", memory_unit(longest)
    return for_both_widths(
        "Peaks",
        lambda is_narrow: bar_chart(bars, title, unit=unit, is_narrow=is_narrow),
        (("measured", "c1"), ("predicted", "faint")),
    )
