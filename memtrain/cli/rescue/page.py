"""The answer of `memtrain rescue` as a page of its own, to send to a colleague."""

from __future__ import annotations

from pathlib import Path

from memtrain.cli.plan.tables import settings_words
from memtrain.cli.rescue.find import Rescue
from memtrain.cli.rescue.words import (
    headroom_words,
    host_words,
    key_lines,
    learns_words,
    no_change_words,
    plan_learns,
    rest_words,
    sentences,
    time_words,
    way_words,
)
from memtrain.memory.plan.units import gib
from memtrain.trainers.pages.charts import Figure
from memtrain.trainers.pages.memory_bars import memory_figure, predicted_bar
from memtrain.trainers.pages.page import render

TEMPLATE = Path(__file__).parent / "templates" / "rescue.html.j2"


def page(found: Rescue) -> str:
    """The whole page, which loads nothing from anywhere."""
    return render(
        TEMPLATE,
        title=f"{found.name}: out of memory on {found.hardware.words()}",
        tiles=_tiles(found),
        sentences=tuple(one for one in (*sentences(found), rest_words(found)) if one),
        memory=_memory(found),
        tool=f"{found.title} (keys of {found.version})",
        own=() if found.own is None else key_lines(found.own),
        own_words=no_change_words(found) if found.own is None else way_words(found.own, found),
        planned=_planned(found),
        recipe_text=_shown(found.recipe_text) if found.plan is not None else "",
        lost=found.lost,
        differences=found.differences,
    )


def _tiles(found: Rescue) -> list[tuple[str, str, str]]:
    """Name, value and remark of the needs, before and after."""
    budget, tiles = gib(found.budget_bytes), []
    if found.was is not None:
        holds = "does not fit" if found.was.need_bytes > found.budget_bytes else "fits by arithmetic"
        tiles.append(("needed as it was", gib(found.was.need_bytes), f"{holds}: there are {budget}"))
    if found.own is not None:
        own = found.own
        tiles.append((f"{found.title}, changed", gib(own.need_bytes), time_words(own.priced, found)))
    if found.plan is not None:
        chosen = found.plan.chosen
        tiles.append(("memtrain", gib(chosen.need_bytes), time_words(chosen, found)))
    return tiles


def _shown(recipe_text: str) -> str:
    """The recipe without the schema's place, which is of this machine."""
    lines = recipe_text.splitlines(keepends=True)
    return "".join(line for line in lines if "yaml-language-server" not in line)


def _memory(found: Rescue) -> Figure:
    """Bars of the owners of memory, before and after the change, on one scale."""
    peaks = []
    if found.held is not None:
        peaks.append((f"as it was: {found.held.phase}", found.held))
    if found.own is not None:
        peaks.append((f"{found.title}, changed", found.own.priced.prediction.peak))
    if found.plan is not None:
        peaks.append(("memtrain", found.plan.prediction.peak))
    return memory_figure([predicted_bar(name, peak) for name, peak in peaks], budget=found.budget_bytes)


def _planned(found: Rescue) -> tuple[str, ...]:
    """Sentences about the plan that fits, if there is one."""
    if found.plan is None:
        return ("No plan fits these cards.",)
    text = (
        f"{settings_words(found.plan.settings)}. Needs {gib(found.plan.chosen.need_bytes)} of "
        f"{gib(found.budget_bytes)}, {time_words(found.plan.chosen, found)}."
    )
    lines = (text, learns_words(plan_learns(found)), headroom_words(found), host_words(found))
    return tuple(line for line in lines if line)
