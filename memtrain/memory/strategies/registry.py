"""The list of memory strategies: every page in the rooms of memory/strategies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from pkgutil import iter_modules
from typing import get_args

from memtrain.memory import strategies
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.rules.oom_recovery import RecoveryStep
from memtrain.memory.strategies.base import (
    Strategy,
    StrategyContext,
    StrategyGroup,
    StrategyRequest,
    Updates,
    no_forms,
)
from memtrain.recipes.sections.memory import Changing, StrategyName

ORDER = tuple(dict.fromkeys((*get_args(StrategyName), *get_args(Changing))))
"""Names as a recipe may say them; exact ones first."""


def _pages() -> Iterator[Strategy]:
    """The strategy of every page of a room."""
    for path in strategies.__path__:
        for found in iter_modules([str(room) for room in Path(path).iterdir() if room.is_dir()]):
            room = Path(getattr(found.module_finder, "path", "")).name
            page = f"{room}.{found.name}"
            strategy = getattr(import_module(f"memtrain.memory.strategies.{page}"), "STRATEGY", None)
            if isinstance(strategy, Strategy):
                yield strategy


STRATEGIES: dict[str, Strategy] = {
    page.name: page for page in sorted(_pages(), key=lambda page: ORDER.index(page.name))
}
"""Every strategy by its name; exact ones first."""


UNNAMED: Updates = {
    "attention": "transformers",
    "liger": False,
    "kernels": "transformers",
    "loss_kernel": "torch",
    "compiled": False,
    "pad_to_multiple_of": None,
    "shard_offload": "none",
}
"""Settings of the plain run that belong to no strategy: kernels, alignment, and where shards wait."""


def wish_of(strategy: Strategy, case: StrategyContext) -> StrategyRequest:
    """Request of the whole recipe for a strategy: its keys, `memory.use`, `memory.never` and
    `memory.allow`."""
    memory = case.recipe.memory
    if strategy.name in memory.use:
        return "on"
    if strategy.name in memory.never:
        return "off"
    own = strategy.wish(case.recipe)
    if own == "allow":
        return "auto" if strategy.name in memory.allow else "off"
    return own


def open_recovery(asked: SourcedRecipe) -> tuple[RecoveryStep, ...]:
    """The steps of a run out of memory that the recipe does not rule out with their strategies."""
    strategies = {one.recovery: one for one in STRATEGIES.values()}
    return tuple(step for step in get_args(RecoveryStep) if not _is_ruled_out(strategies[step], asked))


def _is_ruled_out(strategy: Strategy, asked: SourcedRecipe) -> bool:
    if strategy.name in asked.recipe.memory.never:
        return True
    # A micro-batch whose size is named may still be split.
    keys: Mapping[str, object] = {} if strategy.recovery == "split" else strategy.never_keys(asked.recipe)
    return any(asked.is_set(key) and attrgetter(key)(asked.recipe) == value for key, value in keys.items())


def is_searched(strategy: Strategy) -> bool:
    """Whether the search switches it on and off; else it follows from the recipe by rule."""
    return strategy.changes is not no_forms


def used_in(settings: Settings) -> list[Strategy]:
    """The strategies that a run under `settings` uses."""
    return [strategy for strategy in STRATEGIES.values() if strategy.is_used(settings)]


def without_strategies(settings: Settings, *, but: Collection[StrategyGroup] = ()) -> Settings:
    """The same steps of the same model, plainly: only strategies that choose the trained weights.

    Sequences that were packed are laid out anew; how many are in a micro-batch is left as it is. `but`:
    groups whose strategies stay.
    """
    plain = dict(UNNAMED)
    for strategy in used_in(settings):
        plain |= {} if strategy.axis in but else strategy.plain
    return settings.model_copy(update=plain)
