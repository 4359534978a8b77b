"""The plan as a page of its own: bars of who holds what in each phase, the decisions, the best plans."""

from __future__ import annotations

from pathlib import Path

from memtrain.cli.plan.answer import Answer
from memtrain.cli.plan.tables import recipe_name, seconds, settings_words
from memtrain.memory.explain.reasons import gains, left_out, time_words
from memtrain.memory.plan.units import gib
from memtrain.memory.planner.pinned_recipe import pins, yaml_lines
from memtrain.trainers.pages.charts import Figure
from memtrain.trainers.pages.memory_bars import memory_figure, predicted_bar
from memtrain.trainers.pages.page import render
from memtrain.trainers.tools.trace.client import Traced

TEMPLATE = Path(__file__).parent / "templates" / "plan.html.j2"

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Heading, names of the columns, rows."""


def page(made: Answer, traced: Traced | None) -> str:
    """The whole page; it loads nothing from anywhere."""
    resolved = made.resolved
    budget, peak = resolved.prediction.budget_bytes or 0, resolved.prediction.peak
    verdict = (
        f"Needs {gib(made.chosen.need_bytes)} of {gib(budget)} on each device, {gib(peak.num_bytes)} of "
        "it live "
        f"tensors in the {peak.phase}. Predicted: {made.tokens_per_s:,.0f} tokens/s, "
        f"{seconds(made.chosen.step_s)} a step."
    )
    name = recipe_name(made.question.loaded.path)
    return render(
        TEMPLATE,
        title=f"{resolved.case.recipe.method}: {name} on {made.question.hardware.words()}",
        said=(verdict, *made.notes),
        memory=_memory(made, traced),
        tables=_tables(made),
        lines=yaml_lines(pins(resolved.case.asked, resolved.settings)),
    )


def _memory(made: Answer, traced: Traced | None) -> Figure:
    """A bar for each phase, all on one scale, a colour for each owner."""
    resolved = made.resolved
    rows = [predicted_bar(one.phase, one) for one in resolved.prediction.phases]
    if traced is not None:
        found = traced.prediction.peak
        rows.append(predicted_bar(f"traced: {found.phase}", found))
    rows.append(predicted_bar("without any strategy", resolved.plain.peak))
    return memory_figure(rows, budget=resolved.prediction.budget_bytes)


def _tables(made: Answer) -> list[Table]:
    """The tables below the bars."""
    resolved = made.resolved
    return [
        (
            "Settings",
            ("setting", "value", "why"),
            [(one.setting, one.value, one.reason) for one in resolved.decisions],
        ),
        (
            "Without each of them",
            ("strategy", "peak", "time"),
            [
                (one.strategy, gib(one.peak_bytes), time_words(one.time_share))
                for one in gains(made.chosen, resolved.case.facts)
            ],
        ),
        (
            "Left out",
            ("strategy", "why"),
            [(one.strategy, one.reason) for one in left_out(made.chosen, resolved.case)],
        ),
        (
            "The best plan of each size",
            ("needs", "tokens/s", "how"),
            [
                (
                    gib(one.need_bytes),
                    f"{one.settings.num_processes / one.token_s:,.0f}",
                    settings_words(one.settings),
                )
                for one in made.frontier
            ],
        ),
    ]
