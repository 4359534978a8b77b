"""Pairs that no run has together: the conflicts of every strategy's page, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import Conflict
from memtrain.memory.strategies.registry import STRATEGIES


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two things that no run does together."""

    strategy: str
    """Name of a strategy."""
    other: str
    """The other side in words: another strategy, or a setting."""
    is_other: Callable[[Settings], bool]
    reason: str


def _pair(strategy: str, conflict: Conflict) -> Exclusion:
    is_other = conflict.when or STRATEGIES[conflict.other].is_used
    return Exclusion(strategy, conflict.other, is_other, conflict.reason)


EXCLUSIONS: tuple[Exclusion, ...] = tuple(
    _pair(name, conflict) for name, strategy in STRATEGIES.items() for conflict in strategy.conflicts
)
"""Every pair, in the order of the strategies."""


def excluded(settings: Settings) -> Exclusion | None:
    """The first pair of the table that `settings` break; None when they break none."""
    return next(
        (
            pair
            for pair in EXCLUSIONS
            if STRATEGIES[pair.strategy].is_used(settings) and pair.is_other(settings)
        ),
        None,
    )
