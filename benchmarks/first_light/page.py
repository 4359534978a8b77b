"""The results as one HTML file with its plots inside: nothing is fetched when it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from first_light.published import beside
from first_light.summary import plans, said_of, time_error, traced_error
from memtrain.memory.plan.units import signed
from memtrain.trainers.pages.charts import Bar, Figure, bar_chart
from memtrain.trainers.pages.page import render

Record = Mapping[str, Any]
OWNERS = 10
"""Largest owners of a highest moment that are shown; results.jsonl has more."""
TEMPLATE = Path(__file__).parent / "page.html.j2"


def page(found: Mapping[str, Record], summed: Mapping[str, Any]) -> str:
    """The whole page."""
    groups = list(dict.fromkeys(name.partition("/")[0] for name in found))
    return render(
        TEMPLATE,
        head=head(summed),
        figures=[one for one in (error_plot(found), time_plot(found), speed_plot(found)) if one.svg],
        groups=[(group, section(group, found)) for group in groups],
    )


def head(summed: Mapping[str, Any]) -> str:
    """Where it was measured, and how far the ladder came."""
    where, plan = summed["where"], summed["plan"]
    error = "not measured" if plan["median_error"] is None else f"{plan['median_error']:.1%}"
    worst = "" if plan["worst_error"] is None else f", worst {signed(plan['worst_error'])}"
    commits = ", ".join(where.get("commits", [str(where.get("commit"))]))
    return (
        f"{where.get('device')}, {where.get('date')}, commit {commits}: {summed['done']} of "
        f"{summed['stages']} stages, {len(summed['faults'])} faults. Planned over measured peak: median "
        f"error {error}{worst}, {len(plan['false_fits'])} false fits."
    )


def section(group: str, found: Mapping[str, Record]) -> list[tuple[str, str, str, bool]]:
    """(stage, figures, seconds, is it a fault) of a group, with what others have published.

    Where other processes used the card its seconds say nothing, and it says so."""
    return [row for name, one in found.items() if name.partition("/")[0] == group for row in _rows(name, one)]


def _rows(name: str, one: Record) -> Iterable[tuple[str, str, str, bool]]:
    kind = next((key for key in ("fault", "refused", "skipped") if key in one), "")
    text = f"{kind}: {one[kind]}" if kind else said_of(name, one)
    seconds = "shared card" if one.get("shared") else f"{one.get('seconds', '')} s"
    yield name, text, seconds, kind == "fault"
    for owner in one.get("owners", ())[:OWNERS]:
        yield (
            f"  {owner['bytes'] / 2**20:,.0f} MiB",
            f"{owner['owner']} ({owner['blocks']} blocks)",
            "",
            False,
        )
    if not one.get("shared"):
        yield from _columns(one)
    for record in beside(name):
        figures = [
            f"{record.tokens_per_s:,.0f} tokens/s" if record.tokens_per_s else "",
            f"{record.tokens:,} tokens" if record.tokens else "",
            f"{record.gib:g} GiB" if record.gib else "",
        ]
        yield f"  {record.who}", f"{record.what}: {', '.join(one for one in figures if one)}", "", False


def _columns(one: Record) -> Iterable[tuple[str, str, str, bool]]:
    """Comparisons of a stage, then its sides with what each was set to."""
    for column, told in one.get("columns", {}).items():
        yield f"  {column}", told["words"], "", "ratio" not in told
    for side, told in one.get("sides", {}).items():
        if "tokens_per_s" in told:
            low, high = told["spread"]
            speed = f"{told['tokens_per_s']:,.0f} tokens/s ({low:,.0f}-{high:,.0f})"
            used = ", ".join(f"{key} {value}" for key, value in told["used"].items())
            yield f"  {side}", f"{speed}, peak {told['peak_bytes'] / 2**30:.1f} GiB; {used}", "", False


def error_plot(found: Mapping[str, Record]) -> Figure:
    """The size of each plan's error, with its trace's; their signs stand behind the bars."""
    bars: list[Bar] = []
    for name, one in plans(found):
        error, trace = one["planned_error"], traced_error(one)
        bars.append(Bar(name, [("planned", abs(error), "c1")], signed(error)))
        if trace is not None:
            bars.append(Bar("", [("traced", abs(trace), "faint")], signed(trace)))
    title = "The planner: planned over measured peak, less 1"
    return Figure(title, bar_chart(bars, title, unit=("%", 0.01)), (("planned", "c1"), ("traced", "faint")))


def time_plot(found: Mapping[str, Record]) -> Figure:
    """The size of each planned step time's error; its sign and both times stand behind the bar."""
    bars: list[Bar] = []
    for name, one in plans(found):
        error = time_error(one)
        if error is not None:
            text = f"{error:+.0%}: {one['planned_step_s']:.3f} of {one['step_s']:.3f} s"
            bars.append(Bar(name, [("planned", abs(error), "c1")], text))
    title = "The planner: planned over measured seconds of a step, less 1"
    return Figure(title, bar_chart(bars, title, unit=("%", 0.01)), (("planned", "c1"),))


def speed_plot(found: Mapping[str, Record]) -> Figure:
    """Tokens a second of each speed stage, with what others have published beside it."""
    bars: list[Bar] = []
    for name, one in found.items():
        if name.startswith("speed/") and one.get("tokens_per_s") and not one.get("shared"):
            speeds = [(name, one["tokens_per_s"], "c1")]
            speeds += [
                (f"{r.who}: {r.what}", r.tokens_per_s, "faint") for r in beside(name) if r.tokens_per_s
            ]
            bars += [Bar(label, [(label, speed, colour)], f"{speed:,.0f}") for label, speed, colour in speeds]
    title = "Tokens a second"
    drawn = bar_chart(bars, title, unit=("tokens/s", 1.0))
    return Figure(title, drawn, (("memtrain", "c1"), ("published by others", "faint")))
