"""The page of all memory strategies, in Markdown: effects, savings, costs and exclusions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from memtrain.memory.strategies.base import Strategy
from memtrain.memory.strategies.exclusions import EXCLUSIONS
from memtrain.memory.strategies.registry import STRATEGIES
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.recipe import Recipe

PROVEN = Path(__file__).parent / "proven.json"
"""Counts of exact combinations; benchmarks/exactness.py writes them from its results."""

INTRODUCTION = """\
Written from the pages in `memtrain/memory/strategies/` by `make docs-reference`; each page names its source.
In a recipe: `memory.use` (it must be used), `memory.never` (it must not), `memory.allow` (it changes the
result of training, and may be used where no exact plan fits). The strategies of a plan and their gains:
[memory planning](memory.md)."""


LABELS = ("When", "Saves", "Costs", "Not exact", "Exact", "Refused")
"""Sections of a strategy's page, each after its own word and a colon."""


def strategies_page() -> str:
    """The whole of docs/strategies.md; `make docs-reference` writes it."""
    recipe = load_recipe("dpo/qwen3-0.6b-lora").recipe
    exact = [one for one in STRATEGIES.values() if one.is_exact]
    changing = [one for one in STRATEGIES.values() if not one.is_exact]
    parts = [
        "# Memory strategies",
        "",
        INTRODUCTION,
        "",
        "## With the same numbers",
        "",
        *_table(exact, recipe),
        "",
        "## Changing the result of training",
        "",
        *_table(changing, recipe),
        "",
        "## What excludes what",
        "",
        *_lines(
            ("strategy", "not with", "because"),
            ((f"`{one.strategy}`", _name(one.other), one.reason) for one in EXCLUSIONS),
        ),
        "",
        "## One by one",
        "",
        *(line for one in (*exact, *changing) for line in _section(one, recipe)),
        *_proven_together(),
    ]
    return "\n".join(parts)


def _proven_together() -> list[str]:
    """The section of measurements: strategies alone and in pairs, all methods together."""
    made = json.loads(PROVEN.read_text(encoding="utf-8"))
    exact = {frozenset(names.split()): count for names, count in made["exact"].items()}
    return [
        "## Proven together",
        "",
        "Written by `python benchmarks/exactness.py`. A number is on how many of "
        f"{len(made['methods']) * len(made['backends'])} combinations of method and attention back end",
        f"({', '.join(made['methods'])}; {', '.join(made['backends'])})",
        "the two together, or on the diagonal the one alone, gave the losses, log-probs, gradients and",
        "updates of the plain run. On all others the plan refuses them, with a reason (`-`: on all), or the",
        "two were not made together (`?`).",
        "By method, in triples, and every reason: [the matrix of strategies](exactness.md).",
        "",
        *pairs_table(made["strategies"], exact),
        "",
    ]


def pairs_table(names: Sequence[str], exact: Mapping[frozenset[str], int]) -> list[str]:
    """A table of strategies alone (the diagonal) and in pairs, each with its number in `exact`."""
    numbers = {name: number for number, name in enumerate(names, start=1)}
    lines = ["| | " + " | ".join(map(str, numbers.values())) + " |", "|---" * (len(numbers) + 1) + "|"]
    for row in names:
        cells = [
            str(exact.get(frozenset((row, column)), "?") or "-") if numbers[column] >= numbers[row] else ""
            for column in names
        ]
        lines.append(f"| {numbers[row]} `{row}` | " + " | ".join(cells) + " |")
    return lines


def _table(strategies: Iterable[Strategy], recipe: Recipe) -> list[str]:
    return _lines(
        ("strategy", "what it does", "saves", "costs", "in the recipe", "source"),
        (
            (f"`{one.name}`", one.summary, one.saves, one.costs, _keys(one, recipe), _source(one))
            for one in strategies
        ),
    )


def _lines(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]


def _keys(strategy: Strategy, recipe: Recipe) -> str:
    keys = strategy.use_keys(recipe)
    return ", ".join(f"`{key}`" for key in keys) or "`length.max_length`"


def _name(other: str) -> str:
    return f"`{other}`" if other in STRATEGIES else other


def _section(strategy: Strategy, recipe: Recipe) -> list[str]:
    """The text of a strategy's page, its exclusions, and the place of its figures."""
    summary, _, source = _page_text(strategy).partition(" Source: ")
    first = min(summary.index(f"{label}: ") for label in LABELS if f"{label}: " in summary)
    title = summary[:first].strip().partition(": ")[2]
    parts = re.split(rf"({'|'.join(LABELS)}): ", summary[first:])[1:]
    entries = dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
    entries |= {
        "Not with": "; ".join(
            f"{_name(one.other) if one.strategy == strategy.name else _name(one.strategy)} ({one.reason})"
            for one in EXCLUSIONS
            if strategy.name in (one.strategy, one.other)
        )
        or "nothing",
        "In the recipe": _keys(strategy, recipe),
        "Measured": strategy.measured,
        "Source": source,
    }
    lines = [f"- **{label}**: {words.rstrip('.')}." for label, words in entries.items()]
    return [f"### `{strategy.name}`", "", f"{title[0].upper()}{title[1:]}", "", *lines, ""]


def _source(strategy: Strategy) -> str:
    """The sentence after `Source:` of the strategy's page, up to its first semicolon or bracket."""
    return _page_text(strategy).partition("Source: ")[2].split(";")[0].split(" (")[0].rstrip(".,")


def _page_text(strategy: Strategy) -> str:
    """The docstring of the strategy's page, in one line."""
    module = next(
        module
        for name, module in sys.modules.items()
        if name.startswith("memtrain.memory.strategies.") and getattr(module, "STRATEGY", None) is strategy
    )
    return " ".join((module.__doc__ or "").split())
