"""From rewards to the update: advantages, the passes before it, and answers left out of it."""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.online.rollout.advantages import zero_std_groups
from memtrain.trainers.online.rollout.protocol import OnlineMethod, ScoredRollout, WeightsTokens
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed
from memtrain.trainers.online.rollout.rollout_buffer import Rollout
from memtrain.trainers.online.rollout.scoring_passes import Passes
from memtrain.trainers.protocols.events import REWARD


@dataclass(frozen=True, slots=True)
class AdvantageStep:
    """Step that gives the answers of a rollout their advantages."""

    method: OnlineMethod
    feed: PolicyFeed
    passes: Callable[[], Passes]
    weight_F: Tensor
    group_size: int

    def weigh(self, window: Rollout) -> None:
        """Give a judged window its advantages and log-probs, and say which of its answers are trained on.

        Called by all ranks together: the passes are shared.
        """
        method, needs = self.method, self.method.section.needs
        may_learn_A = ~window.is_cut_A if method.section.mask_truncated else np.ones_like(window.is_cut_A)
        window.is_trained_A = may_learn_A
        window.norms = self._norms(window, may_learn_A)
        self.feed.window = window
        kl_A = None
        if needs.is_for_rewards:
            # Rewards are penalised for every answer: those that are not trained on are in the baseline too.
            window.is_trained_A = np.ones_like(may_learn_A)
            self.passes().fill(self.feed, needs)
            kl_A = _sums(window) if needs.reference else None
        scored = ScoredRollout(
            reward_AF=torch.from_numpy(window.reward_AF),
            weight_F=self.weight_F,
            group_size=self.group_size,
            may_learn_A=torch.from_numpy(may_learn_A),
            kl_A=kl_A,
        )
        window.advantage_A = method.advantages(scored).float().numpy()
        window.is_trained_A = may_learn_A
        if isinstance(method, WeightsTokens):
            window.metrics |= method.weigh_tokens(window, scored)
            window.kept = method.kept()
        if needs.skip_zero_advantage:
            window.is_trained_A = may_learn_A & (window.advantage_A != 0)
        if not needs.is_for_rewards:
            self.passes().fill(self.feed, needs)

    def _norms(self, window: Rollout, may_learn_A: NDArray[np.bool_]) -> list[dict[str, float]]:
        """Divisors of each part's loss, whatever is left out of the update."""
        num_parts = self.method.section.steps_per_rollout
        tokens_A = window.length_A * may_learn_A
        return [
            {
                "answers": float((window.part_A == part).sum()),
                "tokens": float(tokens_A[window.part_A == part].sum()),
                "rollout_tokens": float(tokens_A.sum()) / num_parts,
            }
            for part in range(num_parts)
        ]


def rollout_facts(window: Rollout, reward_A: Tensor, group_size: int) -> dict[str, float]:
    """Metrics of a rollout; `reward_A`: the weighted rewards of its answers."""
    known_A = reward_A[~reward_A.isnan()]
    lengths = window.length_A
    return {
        REWARD: known_A.mean().item() if len(known_A) else float("nan"),
        "reward_std": known_A.std().item() if len(known_A) > 1 else 0.0,
        "zero_std_groups": zero_std_groups(reward_A, group_size).float().mean().item(),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "completions_cut": float(window.is_cut_A.mean()),
        "completions_trained": float(window.is_trained_A.mean()),
        "rollout_tokens": float(np.diff(window.prompt_ptr).sum() + window.context_length_A.sum()),
    }


def _sums(window: Rollout) -> Tensor:
    """Sum over each answer's tokens of log p_old - log p_reference [A]."""
    assert window.old_N is not None, "The pass was made."
    assert window.reference_N is not None, "The pass was made."
    difference_N = window.old_N.astype(np.float64) - window.reference_N
    return torch.from_numpy(np.add.reduceat(difference_N, window.answer_ptr[:-1]))
