"""Proximal policy optimization: a value model, and advantages of single tokens.

Each token's reward is -beta times its log-ratio to the reference, and the last one's also the completion's;
generalised advantage estimation weighs what came against what the value model expected.

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9; of language models: Ziegler et al. 2019,
arXiv:1909.08593, section 2 (the KL term, and its adaptation), Ouyang et al. 2022, arXiv:2203.02155.
What it is not: a completion that was cut counts as over, and its value after the last token is 0.
Knobs: `ppo:`, `generate:` and `rewards:` in the recipe.
What differs from the loop: its steps are those of trainers/online/rollout/online_loop.py; a value model is
trained beside the
policy (model/value_head.py).
"""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.ppo import Ppo as PpoRecipe
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.head.linear import Count, at_least_one, over
from memtrain.trainers.losses.policy.registry import clipped_loss, is_clipped
from memtrain.trainers.losses.policy.value import clipped_value_loss
from memtrain.trainers.online.rollout.advantages import generalised_advantages, standardised, weighted_rewards
from memtrain.trainers.online.rollout.protocol import ScoredRollout
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro, Rollout
from memtrain.trainers.online.rollout.scoring_passes import PolicyMethod, token_sums, valued_scores
from memtrain.trainers.protocols.method import Loss
from memtrain.trainers.reference.reference import Reference

feed = PromptFeed
"""Rows that are prompts."""


def method(recipe: Recipe, reference: Reference | None = None) -> Ppo:
    """The method of a recipe, beside its reference (None with beta 0)."""
    section = recipe.ppo or PpoRecipe()
    mode, _ = section.correction(recipe.generation)
    return Ppo(section, reference, recipe.generation.temperature, mode, beta=section.beta)


@dataclass(slots=True)
class Ppo(PolicyMethod[PpoRecipe]):
    """The method `ppo`."""

    beta: float = 0.0
    """The KL term's weight as it is now."""

    def advantages(self, scored: ScoredRollout) -> Tensor:
        """The reward of each answer [A], 0 where there is no verdict: its tokens are weighed apart."""
        return weighted_rewards(scored.reward_AF, scored.weight_F).nan_to_num(nan=0.0)

    def weigh_tokens(self, window: Rollout, scored: ScoredRollout) -> dict[str, float]:
        """Advantages and returns of all tokens, and beta for the next rollout; their metrics.

        Answers without a verdict are not trained on.
        """
        section, lengths_A = self.section, torch.from_numpy(window.length_A)
        reward_A = weighted_rewards(scored.reward_AF, scored.weight_F)
        window.is_trained_A = window.is_trained_A & ~reward_A.isnan().numpy()
        reward_A = reward_A.nan_to_num(nan=0.0) - section.cut_penalty * torch.from_numpy(window.is_cut_A)
        assert window.value_N is not None, "The pass was made."
        value_N = torch.from_numpy(window.value_N).double()
        reward_N, metrics = torch.zeros_like(value_N), {"beta": self.beta} if section.beta else {}
        if section.beta:
            assert window.old_N is not None, "The pass was made."
            assert window.reference_N is not None, "The pass was made."
            log_ratio_N = torch.from_numpy(window.old_N.astype(np.float64) - window.reference_N)
            reward_N = -self.beta * log_ratio_N
            metrics["kl"] = sum_per_answer(log_ratio_N, lengths_A).mean().item()
        reward_N[torch.from_numpy(window.answer_ptr[1:]) - 1] += reward_A
        advantage_N, return_N = generalised_advantages(
            reward_N, value_N, window.length_A.tolist(), gamma=section.gamma, lam=section.gae_lambda
        )
        metrics |= {
            "value/mean": value_N.mean().item(),
            "value/explained": _explained(value_N, return_N),
        }
        if section.normalize_advantages:
            is_loss_token_N = torch.from_numpy(np.repeat(window.is_trained_A, window.length_A))
            advantage_N = standardised(advantage_N, is_loss_token_N)
        window.token_advantage_N = advantage_N.float().numpy()
        window.return_N = return_N.float().numpy()
        mean_A = sum_per_answer(advantage_N, lengths_A) / lengths_A
        window.advantage_A = mean_A.float().numpy()
        if section.kl_target is not None:
            ratio = window.num_answers / section.kl_horizon
            self.beta = adapted(self.beta, metrics["kl"], section.kl_target, ratio)
        return metrics

    def kept(self) -> dict[str, float]:
        """The weight of the KL term after this rollout."""
        return {"beta": self.beta}

    def go_on(self, kept: Mapping[str, float]) -> None:
        """Take it up again."""
        self.beta = kept["beta"]

    def loss(
        self, model: nn.Module, micro_batch: PolicyMicro, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """Policy loss + value_coef * value loss - entropy_coef * entropy, means over the tokens of the step
        that may be trained on (not over `denominator`); sums over tokens."""
        section, num_tokens = self.section, at_least_one(micro_batch.norms.num_tokens)
        learns_entropy = section.entropy_coef != 0
        scored, value_N = valued_scores(
            model,
            micro_batch,
            temperature=self.temperature,
            want_entropy=want_stats or learns_entropy,
            learns_entropy=learns_entropy,
        )
        assert micro_batch.token_advantage_N is not None, "The tokens were weighed."
        assert micro_batch.return_N is not None, "The tokens were weighed."
        assert micro_batch.value_N is not None, "The pass was made."
        old_N, outside = self.old_and_mismatch(scored.logp_N, micro_batch)
        seen = (old_N.detach(), micro_batch.sampler_N)
        ratio_N = (scored.logp_N - old_N).exp()
        loss_N = clipped_loss(ratio_N, micro_batch.token_advantage_N, self.clip)
        if self.mismatch != "none":
            loss_N = loss_N * outside.weight_N
        value_loss = clipped_value_loss(
            value_N, micro_batch.value_N, micro_batch.return_N, clip=section.value_clip, num_tokens=num_tokens
        )
        value = over(loss_N.sum(), num_tokens) + section.value_coef * value_loss
        if section.entropy_coef:
            assert scored.entropy_N is not None
            value = value - over(section.entropy_coef * scored.entropy_N.sum(), num_tokens)
        if not want_stats:
            return Loss(value, {}, seen)
        assert scored.entropy_N is not None
        low_N, high_N = is_clipped(ratio_N.detach(), micro_batch.token_advantage_N, self.clip)
        sums = {
            "ratio": ratio_N.detach().sum(),
            "clip_low": low_N.float().sum(),
            "clip_high": high_N.float().sum(),
            "entropy": scored.entropy_N.detach().sum(),
            "loss/policy": loss_N.detach().sum(),
            "loss/value": value_loss.detach() * num_tokens,
        }
        return Loss(value, sums | token_sums(scored.logp_N, outside, self.mismatch), seen)


def adapted(beta: float, kl: float, target: float, share: float) -> float:
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) * share): nearer where the policy has drifted too far.

    `share`: answers seen since the last time, over the horizon.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (the log-space proportional controller).
    """
    error = min(0.2, max(-0.2, kl / target - 1.0))
    return beta * (1.0 + error * share)


def _explained(value_N: Tensor, return_N: Tensor) -> float:
    """Share of the returns' variance that the values explain; 0 where returns do not vary."""
    variance = return_N.var(correction=0)
    if not variance > 0:
        return 0.0
    return (1.0 - (return_N - value_N).var(correction=0) / variance).item()
