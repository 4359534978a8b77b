"""Direct preference optimization, and the losses that grew from it.

    -log sigmoid(beta * (log p(chosen) / q(chosen) - log p(rejected) / q(rejected))), q the reference.

Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; the other losses name theirs in
trainers/losses/preference/. The mean is over the pairs of the whole optimizer step.
Knobs: `dpo:` in the recipe.
What differs from the loop: sequences are prompts with their pairs; a reference is asked, or was asked before
training; the `sft` part is a mean over chosen tokens.
"""

# B pairs, A answers (two a pair: chosen, rejected)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.preference import Dpo as DpoRecipe
from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.losses.head.linear import Count, StepCount
from memtrain.trainers.losses.preference.pairs import Divergence, PairKnobs, PairLogps
from memtrain.trainers.losses.preference.registry import preference_loss, preference_sums
from memtrain.trainers.protocols.method import Loss, StepPreview
from memtrain.trainers.reference.answer_logps import AnswerLogps, answer_logps
from memtrain.trainers.reference.precompute import Answered, own_answers
from memtrain.trainers.reference.reference import AskLogps, Reference

Ints = NDArray[np.int64]

feed = AnswerFeed
"""Prompts with pairs of answers."""


def method(recipe: Recipe, reference: Reference | None = None) -> Dpo:
    """The method of a recipe, beside its reference (None where its losses need none)."""
    return Dpo(recipe.dpo or DpoRecipe(), reference, ask(recipe))


def ask(recipe: Recipe) -> AskLogps:
    """Question to a reference."""
    ld_alpha = (recipe.dpo or DpoRecipe()).ld_alpha
    return lambda model, batch: answer_logps(model, batch, ld_alpha=ld_alpha).logp_A


def changes_answers(recipe: Recipe) -> dict[str, Any]:
    """Keys of the recipe that change the reference's log-probs of an answer: part of the key they are kept
    by."""
    return {"ld_alpha": (recipe.dpo or DpoRecipe()).ld_alpha}


def precompute(feed: AnswerFeed, steps: Sequence[Ints], answered: Answered) -> None:
    """Give `feed` the reference's log-probs of the sequences of all steps."""
    values = answered(own_answers(feed, np.unique(np.concatenate(steps))))
    feed.reference_IK = values.reshape(-1, 2)


@dataclass(slots=True)
class Dpo:
    """The method `dpo`."""

    recipe: DpoRecipe
    reference: Reference | None
    ask: AskLogps
    chosen_tokens_per_pair: StepCount = field(default_factory=StepCount)
    """Divisor of the `sft` part over that of pairs, for the whole step."""

    @property
    def knobs(self) -> PairKnobs:
        """The recipe's knobs as the losses read them."""
        return PairKnobs(
            beta=self.recipe.beta,
            label_smoothing=self.recipe.label_smoothing,
            divergence=Divergence(self.recipe.divergence),
            divergence_alpha=self.recipe.divergence_alpha,
            discopop_tau=self.recipe.discopop_tau,
            simpo_gamma=self.recipe.simpo_gamma,
        )

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Count the chosen tokens of the step."""
        pairs = int(ahead.feed.weights[ahead.sequences].sum())
        chosen = ahead.feed.loss_tokens_of(ahead.sequences, 0)
        self.chosen_tokens_per_pair.write(chosen / max(1, pairs), ahead.device)

    def loss(
        self, model: nn.Module, micro_batch: AnswerBatch, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """Sum of the pairs' losses over `denominator`; sums: rewards, margin, accuracy, log-probs."""
        ld_alpha = self.recipe.ld_alpha
        policy = answer_logps(model, micro_batch, ld_alpha=ld_alpha, want_weights=self.recipe.use_weighting)
        reference_A = None
        if self.reference is not None:
            reference_A = self.reference.logps(micro_batch, self.ask)
        logps = _by_pair(policy, reference_A, micro_batch, is_desensitised=ld_alpha is not None)
        weights_B = None if policy.weight_A is None else policy.weight_A.view(-1, 2).prod(1)
        value = preference_loss(
            logps,
            self.recipe.parts,
            self.knobs,
            num_pairs=denominator,
            num_chosen_tokens=denominator * self.chosen_tokens_per_pair.value,
            pair_weights_B=weights_B,
        )
        return Loss(value, preference_sums(logps, self.knobs) if want_stats else {})


def _by_pair(
    policy: AnswerLogps, reference_A: Tensor | None, micro_batch: AnswerBatch, *, is_desensitised: bool
) -> PairLogps:
    chosen_B, rejected_B = policy.logp_A.view(-1, 2).unbind(1)
    chosen_tokens_B, rejected_tokens_B = micro_batch.lengths_A.view(-1, 2).unbind(1)
    reference_B2 = None if reference_A is None else reference_A.view(-1, 2)
    return PairLogps(
        chosen_B,
        rejected_B,
        None if reference_B2 is None else reference_B2[:, 0],
        None if reference_B2 is None else reference_B2[:, 1],
        chosen_tokens_B,
        rejected_tokens_B,
        plain_chosen_B=policy.plain_A.view(-1, 2)[:, 0] if is_desensitised else None,
    )
