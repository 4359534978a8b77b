"""Online DPO: pairs are made of the policy's own completions, the best and the worst of each prompt.

    -log sigmoid(beta * (log p(best) / q(best) - log p(worst) / q(worst))), q the reference.

Source: Guo et al. 2024, arXiv:2402.04792, algorithm 1; the losses:
trainers/losses/preference/online_pairs.py. Where it
differs: rewards or a judge of any kind choose the pair, among two completions or more. Prompts whose
completions are all alike have no pair: they are counted, and the mean is over the pairs that there are.
Knobs: `online_dpo:`, `generate:` and `rewards:` in the recipe.
What differs from the loop: its steps are those of trainers/online/rollout/online_loop.py; a sequence is a
pair.
"""

# A answers, N tokens of answers, F reward functions, G prompts, B pairs.

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.online_dpo import OnlineDpo as OnlineDpoRecipe
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.head.linear import Count, StepCount
from memtrain.trainers.losses.preference.online_pairs import online_pair_loss
from memtrain.trainers.online.rollout.advantages import weighted_rewards
from memtrain.trainers.online.rollout.pair_batches import PairFeed
from memtrain.trainers.online.rollout.protocol import ScoredRollout
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro
from memtrain.trainers.online.rollout.scoring_passes import answer_scores
from memtrain.trainers.protocols.method import Loss, StepPreview
from memtrain.trainers.reference.reference import Reference

feed = PromptFeed
"""Rows that are prompts."""


def method(recipe: Recipe, reference: Reference | None = None) -> OnlineDpo:
    """The method of a recipe, beside its reference."""
    return OnlineDpo(recipe.online_dpo or OnlineDpoRecipe(), reference, recipe.generation.temperature)


@dataclass(slots=True)
class OnlineDpo:
    """The method `online_dpo`."""

    section: OnlineDpoRecipe
    reference: Reference | None
    temperature: float = 1.0
    """Of the policy that wrote the completions, and of the reference: both are scored as it was sampled."""
    metrics: dict[str, float] = field(default_factory=dict)
    num_pairs: StepCount = field(default_factory=StepCount)
    """Of the whole step."""
    answer_feed: type[PairFeed] = PairFeed

    def advantages(self, scored: ScoredRollout) -> Tensor:
        """1 for the chosen answer of each prompt, -1 for the rejected one, 0 for others [A]."""
        return best_and_worst(scored, self.section.min_reward_gap)

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Count the pairs of the step."""
        self.num_pairs.write(max(1.0, float(len(ahead.sequences))), ahead.device)

    def loss(
        self, model: nn.Module, micro_batch: PolicyMicro, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """Sum of the pairs' losses over all pairs of the step (not over `denominator`); sums over pairs."""
        scored = answer_scores(model, micro_batch, temperature=self.temperature, want_entropy=False)
        assert micro_batch.reference_N is not None, "The pass was made."
        lengths_A = micro_batch.answers.lengths_A
        ratio_A = sum_per_answer(scored.logp_N - micro_batch.reference_N, lengths_A)
        chosen_B, rejected_B = ratio_A.view(-1, 2).unbind(1)
        margin_B = chosen_B - rejected_B
        value = online_pair_loss(
            margin_B, loss=self.section.loss, beta=self.section.beta, num_pairs=self.num_pairs.value
        )
        if not want_stats:
            return Loss(value, {})
        beta, logp_A = self.section.beta, sum_per_answer(scored.logp_N, lengths_A).detach()
        sums = {
            "pairs/chosen": beta * chosen_B.sum(),
            "pairs/rejected": beta * rejected_B.sum(),
            "pairs/margin": beta * margin_B.sum(),
            "pairs/accuracy": (margin_B > 0).float().sum(),
            "logps/chosen": logp_A.view(-1, 2)[:, 0].sum(),
            "logps/rejected": logp_A.view(-1, 2)[:, 1].sum(),
            "pairs": margin_B.new_full((), len(margin_B)),
        }
        return Loss(value, {name: one.detach() for name, one in sums.items()})

    def means(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Means over pairs, their number, and the facts of the rollout where it is new."""
        pairs = sums.get("pairs", 0.0)
        means = {name: value / pairs for name, value in sums.items() if name != "pairs"} if pairs else {}
        return means | ({"pairs": pairs} if "pairs" in sums else {}) | self.metrics


def best_and_worst(scored: ScoredRollout, min_reward_gap: float = 0.0) -> Tensor:
    """1 for the best answer of each group, -1 for the worst one, 0 for all others [A].

    The first of several that are equally good. A group has no pair, and is 0, where best and worst do not
    differ by more than `min_reward_gap`, or fewer than two answers have a verdict and may be trained on.
    """
    total_A = weighted_rewards(scored.reward_AF, scored.weight_F)
    total_Gk = total_A.masked_fill(~scored.may_learn_A, torch.nan).view(-1, scored.group_size)
    best_G = total_Gk.nan_to_num(nan=-torch.inf).argmax(1, keepdim=True)
    worst_G = total_Gk.nan_to_num(nan=torch.inf).argmin(1, keepdim=True)
    margin_G = total_Gk.gather(1, best_G) - total_Gk.gather(1, worst_G)
    is_pair_G = (margin_G > min_reward_gap).to(total_Gk.dtype)
    chosen_Gk = torch.zeros_like(total_Gk).scatter(1, best_G, is_pair_G)
    return chosen_Gk.scatter_add(1, worst_G, -is_pair_G).view(-1)
