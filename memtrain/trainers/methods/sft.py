"""Supervised fine-tuning: cross-entropy on the loss tokens.

Source: the maximum-likelihood objective. The mean is over the loss tokens of the whole optimizer step, of
all micro-batches and ranks, so that accumulation equals one large batch (a mean of means does not).
What differs from the loop: nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.sft import Sft as SftRecipe
from memtrain.trainers.batches.collate import MicroBatch
from memtrain.trainers.batches.token_batches import TokenFeed
from memtrain.trainers.losses.cross_entropy import dft_loss, sft_request
from memtrain.trainers.losses.head.linear import LogprobResult, NllResult
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.protocols.method import Loss
from memtrain.trainers.reference.reference import Reference

feed = TokenFeed
"""Rows of loss tokens."""


def method(recipe: Recipe, reference: Reference | None = None) -> Sft:
    """The method of a recipe, without a reference."""
    return Sft(recipe.sft or SftRecipe())


@dataclass(frozen=True, slots=True)
class Sft:
    """The method `sft`."""

    recipe: SftRecipe

    def loss(
        self, model: nn.Module, micro_batch: MicroBatch, *, denominator: float, want_stats: bool
    ) -> Loss:
        """Sum of the tokens' losses over `denominator`; sums: entropy, accuracy, nll where it differs."""
        if self.recipe.loss == "dft":
            return self._dynamic(model, micro_batch, denominator, want_stats)
        request = sft_request(
            micro_batch.targets,
            num_tokens=denominator,
            label_smoothing=self.recipe.label_smoothing,
            z_loss=self.recipe.z_loss,
            want_stats=want_stats,
        )
        result: NllResult = model(micro_batch.model_inputs(), micro_batch.scored_index, request)
        if not want_stats:
            return Loss(result.loss, {})
        assert result.logp_N is not None
        assert result.entropy_N is not None
        sums = {"entropy": result.entropy_N.sum()}
        if result.correct_N is not None:
            sums["accuracy"] = result.correct_N.float().sum()
        if self.recipe.label_smoothing or self.recipe.z_loss:
            sums["nll"] = -result.logp_N.sum()
        return Loss(result.loss, sums)

    def _dynamic(
        self, model: nn.Module, micro_batch: MicroBatch, denominator: float, want_stats: bool
    ) -> Loss:
        request = LogprobRequest(micro_batch.targets, want_entropy=want_stats, learns_entropy=False)
        result: LogprobResult = model(micro_batch.model_inputs(), micro_batch.scored_index, request)
        loss = dft_loss(result.logp_N, num_tokens=denominator)
        if not want_stats:
            return Loss(loss, {})
        assert result.entropy_N is not None
        sums = {"nll": -result.logp_N.detach().sum(), "entropy": result.entropy_N.detach().sum()}
        return Loss(loss, sums)
