"""REINFORCE with a leave-one-out baseline.

A completion's advantage is its reward (less beta times its log-ratio to the reference) against the mean of
the others of its group; whole completions become likelier, by a clipped importance ratio.

Source: Ahmadian et al. 2024, arXiv:2402.14740, section 2.3; Kool et al. 2019 for the baseline.
Knobs: `rloo:`, `generate:` and `rewards:` in the recipe.
What differs from the loop: its steps are those of trainers/online/rollout/online_loop.py.
"""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.grpo_rloo import Rloo as RlooRecipe
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.losses.policy.registry import is_clipped, mean_per_answer
from memtrain.trainers.losses.policy.sequence_level import (
    answer_log_ratio,
    penalised_rewards,
    sequence_clipped_loss,
)
from memtrain.trainers.online.rollout.advantages import (
    leave_one_out_advantages,
    weighted_rewards,
    zero_std_groups,
)
from memtrain.trainers.online.rollout.protocol import ScoredRollout
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro
from memtrain.trainers.online.rollout.scoring_passes import PolicyMethod, answer_scores, token_sums
from memtrain.trainers.protocols.method import Loss
from memtrain.trainers.reference.reference import Reference

feed = PromptFeed
"""Rows that are prompts."""


def method(recipe: Recipe, reference: Reference | None = None) -> Rloo:
    """The method of a recipe, beside its reference (None with beta 0)."""
    section = recipe.rloo or RlooRecipe()
    mode, _ = section.correction(recipe.generation)
    return Rloo(section, reference, recipe.generation.temperature, mode)


@dataclass(slots=True)
class Rloo(PolicyMethod[RlooRecipe]):
    """The method `rloo`."""

    kl: float | None = None
    """Mean over completions of log p - log q, of the newest rollout."""

    def advantages(self, scored: ScoredRollout) -> Tensor:
        """Clipped rewards less the KL term, against the mean of the others [A]."""
        group_size = scored.group_size
        total_A = weighted_rewards(scored.reward_AF, scored.weight_F)
        if self.section.reward_clip is not None:
            total_A = total_A.clamp(*self.section.reward_clip)
        if scored.kl_A is not None:
            total_A = penalised_rewards(total_A, scored.kl_A, beta=self.section.beta)
            self.kl = scored.kl_A.mean().item()
        normalise = self.section.normalize_advantages
        advantage_A = leave_one_out_advantages(total_A, group_size, normalise=normalise)
        if normalise:
            return advantage_A
        zero_advantage_A = zero_std_groups(total_A, group_size).repeat_interleave(group_size)
        return advantage_A.masked_fill(zero_advantage_A, 0.0)

    def loss(
        self, model: nn.Module, micro_batch: PolicyMicro, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """The mean over the completions of the step (not over `denominator`); sums over tokens."""
        scored = answer_scores(model, micro_batch, temperature=self.temperature, want_entropy=want_stats)
        lengths_A = micro_batch.answers.lengths_A
        old_N, outside = self.old_and_mismatch(scored.logp_N, micro_batch)
        seen = (old_N.detach(), micro_batch.sampler_N)
        log_ratio_A = answer_log_ratio(scored.logp_N, old_N, lengths_A)
        value = sequence_clipped_loss(
            log_ratio_A,
            micro_batch.advantage_A,
            self.clip,
            num_answers=micro_batch.norms.num_answers,
            mismatch_A=None if self.mismatch == "none" else mean_per_answer(outside.weight_N, lengths_A),
        )
        if not want_stats:
            return Loss(value, {}, seen)
        assert scored.entropy_N is not None
        low_A, high_A = is_clipped(log_ratio_A.detach().exp(), micro_batch.advantage_A, self.clip)
        sums = {
            "entropy": scored.entropy_N.detach().sum(),
            # By tokens, as every sum is: an answer that is clipped counts all of its own.
            "clip_low": (low_A * lengths_A).float().sum(),
            "clip_high": (high_A * lengths_A).float().sum(),
        }
        return Loss(value, sums | token_sums(scored.logp_N, outside, self.mismatch), seen)

    def means(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Means over the tokens that were forwarded, and the facts of the rollout where it is new."""
        kl = {} if self.kl is None or not self.metrics else {"kl": self.kl}
        return super(Rloo, self).means(sums, count) | kl
