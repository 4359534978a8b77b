"""Group relative policy optimization, and the losses that grew from it.

A completion's advantage is its reward against the others of its group; tokens that made good completions
become likelier, by a clipped importance ratio.

Source: Shao et al. 2024, arXiv:2402.03300, eq. 3; the default loss is DAPO's, Yu et al. 2025,
arXiv:2503.14476, eq. 8; the other losses name theirs in trainers/losses/policy_*.py.
Knobs: `grpo:`, `generate:` and `rewards:` in the recipe.
What differs from the loop: its steps are those of trainers/online/rollout/online_loop.py.
"""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.grpo_rloo import Grpo as GrpoRecipe
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.losses.policy.registry import GammaShape, PolicyBatch, PolicyKnobs, policy_loss
from memtrain.trainers.online.rollout.advantages import (
    decoupled_advantages,
    group_advantages,
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


def method(recipe: Recipe, reference: Reference | None = None) -> Grpo:
    """The method of a recipe, beside its reference (None with beta 0)."""
    section = recipe.grpo or GrpoRecipe()
    mode, _ = section.correction(recipe.generation)
    return Grpo(section, reference, recipe.generation.temperature, mode)


@dataclass(slots=True)
class Grpo(PolicyMethod[GrpoRecipe]):
    """The method `grpo`."""

    @property
    def knobs(self) -> PolicyKnobs:
        """The recipe's knobs as the losses read them."""
        own = self.section
        return PolicyKnobs(
            loss=own.loss,
            level=own.level,
            clip=self.clip._replace(delta=own.delta),
            cispo_max_weight=own.cispo_max_weight,
            sapo_pos=own.sapo_temperature_pos,
            sapo_neg=own.sapo_temperature_neg,
            gamma=GammaShape(own.vespo_k_pos, own.vespo_lambda_pos, own.vespo_k_neg, own.vespo_lambda_neg),
            beta=own.beta,
            kl=own.kl,
            unbiased_kl=own.unbiased_kl,
            entropy_coef=own.entropy_coef,
            off_policy_limit=own.off_policy_limit,
        )

    def advantages(self, scored: ScoredRollout) -> Tensor:
        """Rewards against their group [A]; exactly 0 where a group has no best answer."""
        group_size = scored.group_size
        total_A = weighted_rewards(scored.reward_AF, scored.weight_F)
        if self.section.combine_rewards == "normalize_then_sum":
            return decoupled_advantages(scored.reward_AF, scored.weight_F, group_size)
        advantage_A = group_advantages(total_A, group_size, self.section.scale_rewards)
        zero_advantage_A = zero_std_groups(total_A, group_size).repeat_interleave(group_size)
        return advantage_A.masked_fill(zero_advantage_A, 0.0)

    def loss(
        self, model: nn.Module, micro_batch: PolicyMicro, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """The policy loss, divided as its name says (not by `denominator`); sums over tokens."""
        learns_entropy = self.section.entropy_coef != 0
        scored = answer_scores(
            model,
            micro_batch,
            temperature=self.temperature,
            want_entropy=want_stats or learns_entropy,
            learns_entropy=learns_entropy,
        )
        old_N, outside = self.old_and_mismatch(scored.logp_N, micro_batch)
        seen = (old_N.detach(), micro_batch.sampler_N)
        batch = PolicyBatch(
            logp_N=scored.logp_N,
            lengths_A=micro_batch.answers.lengths_A,
            advantage_A=micro_batch.advantage_A,
            old_logp_N=micro_batch.old_N,
            sampler_logp_N=micro_batch.sampler_N if self.mismatch != "none" else None,
            reference_N=micro_batch.reference_N,
            entropy_N=scored.entropy_N,
            mismatch_N=outside.weight_N if self.mismatch != "none" else None,
            is_kept_N=micro_batch.is_kept_N,
        )
        made = policy_loss(batch, self.knobs, micro_batch.norms)
        if not want_stats:
            return Loss(made.value, {}, seen)
        return Loss(made.value, made.sums | token_sums(scored.logp_N, outside, self.mismatch), seen)
