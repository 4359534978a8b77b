"""The answer of `memtrain rescue` as a page of its own, to send to a colleague."""

from __future__ import annotations

from html import escape

from memtrain.cli.plan.html import STYLE, bars
from memtrain.cli.plan.tables import settings_words
from memtrain.cli.rescue.find import Rescue
from memtrain.cli.rescue.words import (
    host_words,
    key_lines,
    learns_words,
    plan_learns,
    time_words,
    verdict,
    way_words,
)
from memtrain.memory.plan.plan import PhasePeak
from memtrain.memory.plan.units import gib


def page(found: Rescue) -> str:
    """The whole page; it loads nothing from anywhere."""
    title = f"{found.name}: out of memory on {found.hardware.words()}"
    phases: list[tuple[str, PhasePeak]] = []
    if found.held is not None:
        phases.append((f"as it was: {found.held.phase}", found.held))
    if found.own is not None:
        phases.append((f"{found.title}, changed", found.own.priced.prediction.peak))
    if found.plan is not None:
        phases.append(("memtrain", found.plan.prediction.peak))
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (verdict(found), *found.clues, *found.notes)),
        "<h2>What held the memory, and what would</h2>",
        bars(phases, found.budget_bytes),
        *_own(found),
        *_plan(found),
    ]
    if found.lost:
        items = "".join(f"<li>{escape(line)}</li>" for line in found.lost)
        parts += ["<h2>Not carried over</h2>", f"<ul>{items}</ul>"]
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def _own(found: Rescue) -> list[str]:
    if found.own is None:
        return []
    return [
        f"<h2>The smallest change in {escape(found.title)}</h2>",
        f"<pre>{escape(chr(10).join(key_lines(found.own)))}</pre>",
        f"<p>{escape(way_words(found.own, found))}</p>",
    ]


def _plan(found: Rescue) -> list[str]:
    if found.plan is None:
        return ["<h2>As a recipe of memtrain</h2>", "<p>No plan fits these cards.</p>"]
    said = (
        f"{settings_words(found.plan.settings)}. Needs {gib(found.plan.chosen.need_bytes)} of "
        f"{gib(found.budget_bytes)}, {time_words(found.plan.chosen, found)}."
    )
    lines = (said, learns_words(plan_learns(found)), host_words(found))
    text = f"<pre>{escape(found.recipe_text)}</pre>" if found.recipe_text else ""
    return ["<h2>As a recipe of memtrain</h2>", *(f"<p>{escape(line)}</p>" for line in lines if line), text]
