"""The plan as a page: bars of the owners of memory in each phase, the decisions, the best plans."""

from __future__ import annotations

import math
from pathlib import Path

from memtrain.cli.plan.answer import Answer
from memtrain.cli.plan.tables import host_words, recipe_name, seconds, settings_words, sum_rows
from memtrain.memory.estimate.pricing import Priced
from memtrain.memory.explain.reasons import gains, left_out, time_words
from memtrain.memory.explain.tables import as_run, with_vllm
from memtrain.memory.plan.units import gib
from memtrain.memory.planner.pinned_recipe import pins, yaml_lines
from memtrain.trainers.pages.charts import Figure, for_both_widths
from memtrain.trainers.pages.memory_bars import memory_figure, memory_unit, predicted_bar
from memtrain.trainers.pages.page import render
from memtrain.trainers.pages.scatter import Spot, pareto_chart
from memtrain.trainers.tools.trace.client import Traced

TEMPLATE = Path(__file__).parent / "templates" / "plan.html.j2"

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Heading, names of the columns, rows."""


def page(made: Answer, traced: Traced | None) -> str:
    """The whole page, which loads nothing from anywhere."""
    resolved = made.resolved
    name = recipe_name(made.question.loaded.path)
    return render(
        TEMPLATE,
        title=f"{resolved.case.recipe.method}: {name} on {made.question.hardware.words()}",
        how=f"{settings_words(made.chosen.settings)} · predicted, not measured",
        tiles=_tiles(made),
        sentences=(*made.notes, host_words(made)),
        memory=_memory(made, traced),
        pareto=_pareto(made),
        tables=_tables(made),
        lines=yaml_lines(pins(resolved.case.asked, resolved.settings)),
    )


def _tiles(made: Answer) -> list[tuple[str, str, str]]:
    """Name, value and remark of the numbers at the top."""
    prediction, plain = made.resolved.prediction, made.resolved.plain.peak
    budget, peak = prediction.budget_bytes or 0, prediction.peak
    return [
        ("needs on each device", gib(made.chosen.need_bytes), f"of {gib(budget)}, margin included"),
        ("live tensors", gib(peak.num_bytes), f"at most, in the {peak.phase}"),
        ("without any strategy", gib(plain.num_bytes), f"of live tensors, in the {plain.phase}"),
        ("tokens/s", f"{made.tokens_per_s:,.0f}", f"{seconds(made.step_s)} a step"),
    ]


def _memory(made: Answer, traced: Traced | None) -> Figure:
    """A bar for each phase, all on one scale, a colour for each owner."""
    resolved = made.resolved
    # The budget is without a vLLM process that never sleeps: its bar would pass the line.
    sleeps = resolved.settings.sampler_sleep != "none"
    recipe = resolved.case.recipe
    told = as_run(resolved.prediction, recipe)
    shown = with_vllm(told, resolved.settings, recipe) if sleeps else told
    rows = [predicted_bar(one.phase, one) for one in shown.phases]
    if traced is not None:
        found = traced.prediction.peak
        rows.append(predicted_bar(f"traced: {found.phase}", found))
    rows.append(predicted_bar("without any strategy", resolved.plain.peak))
    return memory_figure(rows, budget=resolved.prediction.budget_bytes)


def _pareto(made: Answer) -> Figure:
    """Size against speed of the best plan of each size; the plan itself is the ringed point."""
    unit, size = memory_unit(made.chosen.need_bytes)
    budget = made.resolved.prediction.budget_bytes

    def spot(one: Priced, is_chosen: bool) -> Spot:
        speed = made.speed(one)
        fits = budget is None or one.need_bytes <= budget
        text = f"{gib(one.need_bytes)}, {speed:,.0f} tokens/s: {settings_words(one.settings)}"
        return Spot(one.need_bytes / size, speed, text, "c1" if fits else "c8", is_chosen)

    most = math.inf if budget is None else 2 * budget
    others = [one for one in made.frontier if one.settings != made.chosen.settings and one.need_bytes <= most]
    spots = [*(spot(one, False) for one in others), spot(made.chosen, True)]
    is_near = budget is not None and budget <= 4 * made.chosen.need_bytes
    limit = (f"budget {gib(budget)}", budget / size) if budget is not None and is_near else None
    title = "Size against speed: the best plan of each size"
    needs = f"needed on each device, {unit}"
    shown = {spot.colour for spot in spots}
    return for_both_widths(
        title,
        lambda is_narrow: pareto_chart(
            spots, title, x_unit=needs, y_unit="tokens/s", limit=limit, is_narrow=is_narrow
        ),
        [one for one in (("fits", "c1"), ("does not fit", "c8")) if one[1] in shown],
    )


def _tables(made: Answer) -> list[Table]:
    """The tables below the bars."""
    resolved = made.resolved
    return [
        ("From live tensors to the need", ("size", "of"), sum_rows(made)),
        (
            "Settings",
            ("setting", "value", "why"),
            [(one.setting, one.value, one.reason) for one in resolved.decisions],
        ),
        (
            "Without each strategy",
            ("strategy", "peak", "time"),
            [
                (one.strategy, gib(one.peak_bytes), time_words(one.time_share))
                for one in gains(made.chosen, resolved.case.facts)
            ],
        ),
        (
            "Strategies left out",
            ("strategy", "why"),
            [(one.strategy, one.reason) for one in left_out(made.chosen, resolved.case)],
        ),
        (
            "Best plan of each size",
            ("needs", "tokens/s", "how"),
            [
                (
                    gib(one.need_bytes),
                    f"{made.speed(one):,.0f}",
                    settings_words(one.settings),
                )
                for one in made.frontier
            ],
        ),
    ]
