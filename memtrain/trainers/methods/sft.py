"""Supervised fine-tuning: cross-entropy on the loss tokens.

Source: the maximum-likelihood objective. The mean is over the loss tokens of the whole optimizer step, of
all micro-batches and ranks, so that accumulation equals one large batch (a mean of means does not).
What differs from the loop: nothing else.
"""

# N loss tokens of one micro-batch

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.sft import Sft as SftRecipe
from memtrain.trainers.batches.collate import MicroBatch, TokenFeed
from memtrain.trainers.losses.head.linear import Count, LogprobResult, NllOptions, NllResult, one_over, over
from memtrain.trainers.losses.head.request import LogprobRequest, NllRequest
from memtrain.trainers.protocols.method import Loss
from memtrain.trainers.reference.reference import Reference

# The losses of supervised fine-tuning: cross-entropy over loss tokens, and dynamic fine-tuning.


def sft_request(
    targets_N: Tensor,
    *,
    num_tokens: Count,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    want_stats: bool = False,
) -> NllRequest:
    """Asks for sum over tokens of -log p(target) / `num_tokens`, smoothed, plus z-loss (see `weighted_nll`).

    `num_tokens` counts the loss tokens of the whole optimizer step over all ranks, so that micro-batches
    and ranks add up to one large batch; where gradients are averaged over ranks, divide it by their number.
    """
    weights_N = one_over(num_tokens, tuple(targets_N.shape), targets_N.device)
    options = NllOptions(label_smoothing, z_loss, want_stats, weight_of_all=1.0 / num_tokens)
    return NllRequest(targets_N, weights_N, options)


def dft_loss(logp_N: Tensor, *, num_tokens: Count) -> Tensor:
    """Sum over tokens of -p * log p / `num_tokens`, p taken as a constant: unlikely tokens count less.

    `num_tokens` as in `sft_request`. The gradient is p times that of cross-entropy.
    Source: Wu et al. 2025, "On the Generalization of SFT", arXiv:2508.05629 (the
    token-level dynamic fine-tuning objective).
    """
    return over(-(logp_N.exp().detach() * logp_N).sum(), num_tokens)


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
        self, model: nn.Module, micro_batch: MicroBatch, *, denominator: Count, want_stats: bool
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
        self, model: nn.Module, micro_batch: MicroBatch, denominator: Count, want_stats: bool
    ) -> Loss:
        request = LogprobRequest(micro_batch.targets, want_entropy=want_stats, learns_entropy=False)
        result: LogprobResult = model(micro_batch.model_inputs(), micro_batch.scored_index, request)
        loss = dft_loss(result.logp_N, num_tokens=denominator)
        if not want_stats:
            return Loss(loss, {})
        assert result.entropy_N is not None
        sums = {"nll": -result.logp_N.detach().sum(), "entropy": result.entropy_N.detach().sum()}
        return Loss(loss, sums)
