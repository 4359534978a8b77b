"""The page of all memory strategies, in Markdown: what each does, saves and costs, and what excludes what."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from memtrain.memory.all_strategies import STRATEGIES
from memtrain.memory.exclusions import EXCLUSIONS
from memtrain.memory.strategy import Strategy
from memtrain.recipes.load import load_recipe
from memtrain.recipes.recipe import Recipe

INTRODUCTION = """\
Written from the pages in `memtrain/memory/strategies/` by `make docs-reference`; each page names its source.
In a recipe: `memory.use` (it must be used), `memory.never` (it must not), `memory.allow` (it changes what is
learnt, and may be used where no exact plan fits). Which of them a plan takes, and what each buys:
[memory.md](memory.md)."""


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
        "## Changing what is learnt",
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


def _source(strategy: Strategy) -> str:
    """The sentence after `Source:` of the strategy's page, up to its first semicolon or bracket."""
    module = next(
        module
        for name, module in sys.modules.items()
        if name.startswith("memtrain.memory.strategies.") and getattr(module, "STRATEGY", None) is strategy
    )
    said = " ".join((module.__doc__ or "").partition("Source: ")[2].split())
    return said.split(";")[0].split(" (")[0].rstrip(".,")
