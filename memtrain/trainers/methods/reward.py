"""A reward model, trained on pairs: Bradley-Terry on one number for each answer.

    -log sigmoid(R(chosen) - R(rejected) - margin) + c (R(chosen) + R(rejected))^2

Source: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023 (Llama 2),
arXiv:2307.09288, eq. 2; centring: Eisenstein et al. 2023, arXiv:2312.09244, its regularizer.
Knobs: `reward:` in the recipe.
What differs from the loop: sequences are prompts with their pairs, and the model ends in a score, read at the
last token of each answer. Evaluation also tells how well calibrated the probabilities are.
"""

# B pairs, A answers (two a pair: chosen, rejected)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.preference import Reward as RewardRecipe
from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.losses.preference.calibration import calibration_error, calibration_sums
from memtrain.trainers.losses.preference.reward import bradley_terry_loss, reward_sums
from memtrain.trainers.protocols.method import Loss
from memtrain.trainers.reference.reference import Reference

feed = AnswerFeed
"""Prompts with pairs of answers."""


def method(recipe: Recipe, reference: Reference | None = None) -> Reward:
    """The method of a recipe, without a reference."""
    return Reward(recipe.reward or RewardRecipe())


@dataclass(frozen=True, slots=True)
class Reward:
    """The method `reward`."""

    recipe: RewardRecipe

    def loss(
        self, model: nn.Module, micro_batch: AnswerBatch, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """Sum of the pairs' losses over `denominator`; sums: rewards, margin, accuracy, and calibration."""
        reward_A: Tensor = model(micro_batch.micro_batch.model_inputs(), micro_batch.last_A)
        chosen_B, rejected_B = reward_A.view(-1, 2).unbind(1)
        # A row without a margin asks for none.
        margin_B = micro_batch.label_I.nan_to_num(0.0) if self.recipe.use_margin else None
        value = bradley_terry_loss(
            chosen_B,
            rejected_B,
            num_pairs=denominator,
            margin_B=margin_B,
            center_coefficient=self.recipe.center_rewards_coefficient,
        )
        if not want_stats:
            return Loss(value, {})
        sums = reward_sums(chosen_B, rejected_B)
        if not torch.is_grad_enabled():
            sums |= calibration_sums(chosen_B, rejected_B)
        return Loss(value, sums)

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means over pairs; at evaluation, the calibration error instead of its bins."""
        means_of_sums, error = calibration_error(sums, count)
        means = {name: value / count for name, value in means_of_sums.items()}
        return means if error is None else means | {"calibration": error}
