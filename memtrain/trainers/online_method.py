"""What a method that learns from its own completions brings to the online loop."""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from memtrain.recipes.online import FromOwnCompletions
from memtrain.trainers.reference import Reference


@dataclass(frozen=True, slots=True)
class Needs:
    """Passes without gradients that come before an update; each costs a forward pass over all answers."""

    old: bool
    """Log-probs of the policy as it was when the answers were written: where it moves before it has learnt
    from all of them, or rewards are penalised by them."""
    reference: bool
    top_entropy: float | None = None
    """Share of tokens that are kept, those of the highest entropy."""
    is_for_rewards: bool = False
    """Rewards depend on the passes; else advantages come first, and answers without signal are left out."""
    drops_silent: bool = True
    """Answers of advantage 0 add nothing: no KL term and no entropy looks at them."""


@runtime_checkable
class OnlineMethod(Protocol):
    """A method whose rows are prompts."""

    section: FromOwnCompletions
    reference: Reference | None
    needs: Needs
    temperature: float
    told: dict[str, float]
    """What the metrics say beside the sums; the loop puts the rollout's facts here."""

    def advantages(self, reward_AF: Tensor, weight_F: Tensor, group_size: int, kl_A: Tensor | None) -> Tensor:
        """The advantage of each answer [A]; groups stand one after another. `kl_A`: sum of log p - log q."""
        ...
