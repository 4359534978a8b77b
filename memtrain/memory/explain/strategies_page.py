"""The page of all memory strategies, in Markdown: effects, savings, costs and exclusions."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from memtrain.memory.strategies.base import Strategy
from memtrain.memory.strategies.exclusions import EXCLUSIONS
from memtrain.memory.strategies.registry import STRATEGIES
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.recipe import Recipe

INTRODUCTION = """\
Written from the pages in `memtrain/memory/strategies/` by `make docs-reference`; each page names its source.
In a recipe: `memory.use` (it must be used), `memory.never` (it must not), `memory.allow` (it changes the
result of training, and may be used where no exact plan fits). The strategies of a plan and their gains:
[memory.md](memory.md)."""


LABELS = ("When", "Saves", "Costs", "Not exact", "Exact", "Refused")
"""Sections of a strategy's page, each after its own word and a colon."""


def strategies_page() -> str:
    """docs/strategies.md without its last section, of benchmarks/exactness.py. By `make docs-reference`."""
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
    ]
    return "\n".join(parts)


def _table(strategies: Iterable[Strategy], recipe: Recipe) -> list[str]:
    return _lines(
        ("strategy", "what it does", "saves", "costs", "in the recipe", "source"),
        (
            (f"`{one.name}`", one.says, one.saves, one.costs, _keys(one, recipe), _source(one))
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
    says, _, source = _said_of(strategy).partition(" Source: ")
    first = min(says.index(f"{label}: ") for label in LABELS if f"{label}: " in says)
    title = says[:first].strip().partition(": ")[2]
    parts = re.split(rf"({'|'.join(LABELS)}): ", says[first:])[1:]
    told = dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
    told |= {
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
    lines = [f"- **{label}**: {words.rstrip('.')}." for label, words in told.items()]
    return [f"### `{strategy.name}`", "", f"{title[0].upper()}{title[1:]}", "", *lines, ""]


def _source(strategy: Strategy) -> str:
    """The sentence after `Source:` of the strategy's page, up to its first semicolon or bracket."""
    return _said_of(strategy).partition("Source: ")[2].split(";")[0].split(" (")[0].rstrip(".,")


def _said_of(strategy: Strategy) -> str:
    """The docstring of the strategy's page, in one line."""
    module = next(
        module
        for name, module in sys.modules.items()
        if name.startswith("memtrain.memory.strategies.") and getattr(module, "STRATEGY", None) is strategy
    )
    return " ".join((module.__doc__ or "").split())
