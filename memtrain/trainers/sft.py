"""Supervised fine-tuning: cross-entropy on the learnt tokens.

Source: the maximum-likelihood objective; the mean is taken over the learnt tokens of the whole optimizer step, over
all micro-batches and ranks, so that accumulation equals one large batch (per-micro-batch means do not: Unsloth's
and Hugging Face's gradient-accumulation note of October 2024).
What differs from the loop: nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from memtrain.recipes.methods import Sft as SftRecipe
from memtrain.trainers.data.collate import MicroBatch
from memtrain.trainers.losses.request import NllRequest
from memtrain.trainers.method import Loss


@dataclass(frozen=True, slots=True)
class Sft:
    """The method `sft`."""

    recipe: SftRecipe

    def loss(self, model: nn.Module, micro: MicroBatch, *, denominator: float, want_stats: bool) -> Loss:
        """Sum of the learnt tokens' losses over `denominator`; sums: nll, entropy, correct."""
        weights_N = torch.full(
            (micro.num_learnt,), 1.0 / denominator, dtype=torch.float32, device=micro.targets.device
        )
        request = NllRequest(
            micro.targets,
            weights_N,
            label_smoothing=self.recipe.label_smoothing,
            z_loss=self.recipe.z_loss,
            want_stats=want_stats,
        )
        result = model(micro.model_inputs(), micro.scored_index, request)
        sums = {}
        if want_stats:
            sums = {
                "nll": -result.logp_N.sum(),
                "entropy": result.entropy_N.sum(),
                "correct": result.correct_N.sum(),
            }
        return Loss(result.loss, sums)
