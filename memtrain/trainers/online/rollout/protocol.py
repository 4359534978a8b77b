"""The protocol of methods that learn from their own completions."""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from memtrain.recipes.sections.methods.online_base import FromOwnCompletions
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, Rollout
from memtrain.trainers.reference.reference import Reference


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """The answers of a rollout with their verdicts; the answers of a group stand next to each other."""

    reward_AF: Tensor
    """float64; NaN where a function gave no verdict."""
    weight_F: Tensor
    group_size: int
    may_learn_A: Tensor
    """bool: answers that may be trained on, without cut answers where the recipe says so."""
    kl_A: Tensor | None = None
    """Sum over each answer's tokens of log p - log q, where rewards depend on it."""


@runtime_checkable
class OnlineMethod(Protocol):
    """A method whose rows are prompts."""

    section: FromOwnCompletions
    reference: Reference | None
    temperature: float
    metrics: dict[str, float]
    """Metrics beside the sums; the loop puts the rollout's facts here."""
    answer_feed: type[PolicyFeed]
    """Feed that turns answers into micro-batches."""

    def advantages(self, scored: ScoredRollout) -> Tensor:
        """The advantage of each answer [A]."""
        ...


@runtime_checkable
class WeightsTokens(Protocol):
    """A method with advantages of single tokens."""

    def weigh_tokens(self, window: Rollout, scored: ScoredRollout) -> dict[str, float]:
        """Give the window advantages and returns of its tokens; their metrics. Passes were made."""
        ...

    def kept(self) -> dict[str, float]:
        """Numbers that follow the rollouts, and that a checkpoint must hold."""
        ...

    def go_on(self, kept: Mapping[str, float]) -> None:
        """Take them up again."""
        ...
