"""Distillation: the student's distribution over the next token becomes the teacher's, on the loss tokens.

    beta 0: KL(t || s);  beta 1: KL(s || t);  between: beta KL(t || m) + (1 - beta) KL(s || m),
    m = beta t + (1 - beta) s, s the student's distribution and t the teacher's, both at the temperature.

Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649, sections 2 and 3. The mean is over the loss tokens of
the whole optimizer step, of all micro-batches and ranks. A share of the cross-entropy on the data's tokens
may be mixed in; the loss is not multiplied by the square of the temperature.
Knobs: `distill:` in the recipe.
What differs from the loop: before the student's pass the teacher makes hidden states of the same rows,
without gradients; its logits are made in the tiles of the student's, and never whole. From a file of its
likeliest tokens no teacher is there. A share of the steps may learn from the student's own completions, whose
steps are those of trainers/online/rollout/on_policy.py.
"""

# N loss tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.distill import ADAPTER_OFF
from memtrain.recipes.sections.methods.distill import Distill as DistillRecipe
from memtrain.trainers.batches.collate import MicroBatch
from memtrain.trainers.batches.taught_batches import TaughtBatch, TaughtFeed
from memtrain.trainers.losses.distill.linear import DistillResult, DistillTerms
from memtrain.trainers.losses.distill.request import DistillRequest, HiddenStates, Inside, own_hidden
from memtrain.trainers.losses.distill.teachers import Teacher, WholeTeacher
from memtrain.trainers.losses.head.linear import Count, Pairs, one_over
from memtrain.trainers.losses.head.request import HeadForm
from memtrain.trainers.protocols.method import Loss
from memtrain.trainers.reference.reference import FrozenReference, Reference, evaluating

feed = TaughtFeed
"""Rows of loss tokens, with the teacher's likeliest tokens where they come from a file."""


def method(recipe: Recipe, reference: Reference | None = None) -> Distill:
    """The method of a recipe; its reference is the teacher, None where that comes with the rows."""
    return Distill(recipe.distill or DistillRecipe(), cast(FrozenReference | None, reference))


@dataclass(frozen=True, slots=True)
class Distill:
    """The method `distill`."""

    recipe: DistillRecipe
    teacher: FrozenReference | None

    def loss(
        self, model: nn.Module, micro_batch: TaughtBatch, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """Sum of the tokens' losses over `denominator`; sums: divergence, NLL, agreement, the tail's mass."""
        rows = micro_batch
        weights_N = one_over(denominator, tuple(rows.targets.shape), rows.targets.device)
        result = self._result(model, micro_batch, weights_N)
        if not want_stats:
            return Loss(result.loss, {})
        sums = {"nll": -result.logp_N.sum(), "agreement": result.agrees_N.sum()}
        if self.recipe.cross_entropy_weight:
            sums["divergence"] = result.divergence_N.sum()
        if self.recipe.on_policy_fraction:
            sums["on_policy"] = result.divergence_N.new_full((), rows.is_written * rows.num_loss_tokens)
        if micro_batch.likely is not None:
            sums["teacher_tail"] = micro_batch.likely.tail_N.exp().sum()
        return Loss(result.loss, sums)

    def _result(self, model: nn.Module, rows: TaughtBatch, weights_N: Tensor) -> DistillResult:
        def asked(teacher: Teacher) -> DistillResult:
            request = DistillRequest(rows.targets, weights_N, teacher, self._terms())
            return model(rows.model_inputs(), rows.scored_index, request)

        if rows.likely is not None:
            return asked(rows.likely)
        assert self.teacher is not None, "A teacher that is no file is asked."
        if self.recipe.teacher == ADAPTER_OFF:
            return self._of_itself(model, rows, weights_N)
        is_training = torch.is_grad_enabled()

        # Inside the call of the teacher's head, where its weights are: nothing of it is read afterwards.
        def with_head(pairs: Pairs, bias: Tensor | None, form: HeadForm) -> DistillResult:
            hidden, weight = tuple(h for h, _ in pairs), tuple(w for _, w in pairs)
            with torch.set_grad_enabled(is_training):
                return asked(WholeTeacher(hidden, weight, bias, form.rule()))

        with torch.no_grad(), evaluating(self.teacher.scorer):
            return self.teacher.scorer(rows.model_inputs(), rows.scored_index, Inside(with_head))

    def _of_itself(self, model: nn.Module, rows: MicroBatch, weights_N: Tensor) -> DistillResult:
        """The teacher is the student without its adapter: its head is the base of the student's."""
        assert self.teacher is not None, "The student at rest is the teacher."
        with torch.no_grad(), self.teacher.switched(), evaluating(self.teacher.scorer):
            found: HiddenStates = model(rows.model_inputs(), rows.scored_index, Inside(own_hidden))

        def made(pairs: Pairs, bias: Tensor | None, form: HeadForm) -> Teacher:
            return WholeTeacher(found.hidden[:1], (pairs[0][1].detach(),), bias, form.rule())

        request = DistillRequest(rows.targets, weights_N, made, self._terms())
        return model(rows.model_inputs(), rows.scored_index, request)

    def _terms(self) -> DistillTerms:
        return DistillTerms(self.recipe.beta, self.recipe.temperature, self.recipe.cross_entropy_weight)
