"""The plan as a page of its own: bars of who holds what in each phase, the decisions, the best plans."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from memtrain.cli.plan.answer import Answer
from memtrain.cli.plan.tables import recipe_name, seconds, settings_words
from memtrain.memory.explain.reasons import gains, left_out, time_words
from memtrain.memory.plan.plan import PhasePeak
from memtrain.memory.plan.units import gib
from memtrain.memory.planner.pinned_recipe import pins, yaml_lines
from memtrain.trainers.tools.trace.client import Traced

COLOURS = ("#3b6ea8", "#d98c3f", "#5b9b6b", "#b5546b", "#8a78b5", "#8c7a5b", "#5aa7b0", "#9a9a9a", "#c2b24a")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top;
  padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd } td.n { white-space: nowrap }
.bar { display: flex; height: 1.4rem; background: #eee } .bar span { display: block }
.key span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem }
pre { background: #f4f4f4; padding: .75rem; overflow-x: auto }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } th, td { border-color: #444 }
  .bar { background: #333 } pre { background: #262626 } }
"""


def page(made: Answer, traced: Traced | None) -> str:
    """The whole page; it loads nothing from anywhere."""
    resolved = made.resolved
    prediction, budget = resolved.prediction, resolved.prediction.budget_bytes or 0
    name = recipe_name(made.question.loaded.path)
    title = f"{resolved.case.recipe.method}: {name} on {made.question.hardware.words()}"
    peak = prediction.peak
    verdict = (
        f"Needs {gib(made.chosen.need_bytes)} of {gib(budget)} on each device, {gib(peak.num_bytes)} of "
        "it live "
        f"tensors in the {peak.phase}. Predicted: {made.tokens_per_s:,.0f} tokens/s, "
        f"{seconds(made.chosen.step_s)} a step."
    )
    phases = [(one.phase, one) for one in prediction.phases]
    if traced is not None:
        found = traced.prediction.peak
        phases.append((f"traced: {found.phase}", found))
    phases.append(("without any strategy", resolved.plain.peak))
    lines = yaml_lines(pins(resolved.case.asked, resolved.settings))
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(words)}</p>" for words in (verdict, *made.notes)),
        "<h2>Memory breakdown</h2>",
        bars(phases, budget),
        "<h2>Settings</h2>",
        _table(("setting", "value", "why"), [(d.setting, d.value, d.reason) for d in resolved.decisions]),
        "<h2>Without it</h2>",
        _table(
            ("strategy", "peak", "time"),
            [
                (one.strategy, gib(one.peak_bytes), time_words(one.time_share))
                for one in gains(made.chosen, resolved.case.facts)
            ],
        ),
        "<h2>Left out</h2>",
        _table(
            ("strategy", "why"), [(one.strategy, one.reason) for one in left_out(made.chosen, resolved.case)]
        ),
        "<h2>The best plan of each size</h2>",
        _table(
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
        *(("<h2>To pin this plan</h2>", f"<pre>{escape(chr(10).join(lines))}</pre>") if lines else ()),
    ]
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def bars(phases: Sequence[tuple[str, PhasePeak]], budget: int) -> str:
    """A bar for each phase, all on one scale, a colour for each owner."""
    owners = list(dict.fromkeys(owned.owner for _, peak in phases for owned in peak.owners))
    colour = {owner: COLOURS[at % len(COLOURS)] for at, owner in enumerate(owners)}
    widest = max([budget, *(peak.num_bytes for _, peak in phases)])
    key = "".join(f'<span style="background:{colour[owner]}"></span>{escape(owner)}' for owner in owners)
    rows: list[str] = []
    for name, peak in phases:
        pieces = "".join(
            f'<span style="width:{owned.num_bytes / widest:.3%};background:{colour[owned.owner]}" '
            f'title="{escape(owned.owner)} {gib(owned.num_bytes)}"></span>'
            for owned in peak.owners
        )
        rows.append(
            f"<tr><td class=n>{escape(name)}</td><td class=n>{gib(peak.num_bytes)}</td>"
            f'<td style="width:70%"><div class=bar>{pieces}</div></td></tr>'
        )
    scale = f"The full width is {gib(widest)}" + (", the budget." if widest == budget else ".")
    return f"<p class=key>{key}</p><table>{''.join(rows)}</table><p>{scale}</p>"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
