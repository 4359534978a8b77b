"""KTO: learn from single answers that are desirable or not, by how an answer is valued against the others.

    w_D (1 - sigmoid(beta (r - z))) for a desirable answer, w_U (1 - sigmoid(beta (z - r))) for the others,
    r = log p(answer) / q(answer), z = max(0, mean of r over mismatched prompts and answers), q the reference.

Source: Ethayarajh et al. 2024, arXiv:2402.01306, the definition of L_KTO; `apo_zero_unpaired`: D'Oosterlinck
et al. 2024, arXiv:2408.06266, eq. 7, with z = 0. The mean is over the rows of the whole optimizer step.
Knobs: `kto:` in the recipe.
What differs from the loop: before a step's first micro-batch, z is measured without gradients. Each prompt
of the step is matched with the answer of the row before it in the step, or of the nearest before it that
leaves no prompt with an answer to itself, over all micro-batches and ranks. So z depends neither on the
micro-batch (TRL 1.16 needs two rows in each, read in order) nor on the ranks.
"""

# I items (a prompt with one answer), A answers; here both are the same

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.methods.preference import Kto as KtoRecipe
from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.data.packing.mixed_answers import partners
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.losses.preference.kto import apo_zero_unpaired_loss, kl_baseline, kto_loss
from memtrain.trainers.protocols.method import Loss, StepPreview
from memtrain.trainers.reference.answer_logps import answer_logps
from memtrain.trainers.reference.precompute import Answered, Question, digest_of, own_answers
from memtrain.trainers.reference.reference import AskLogps, Reference, evaluating

Ints = NDArray[np.int64]

feed = AnswerFeed
"""Prompts with single answers."""


def method(recipe: Recipe, reference: Reference | None = None) -> Kto:
    """The method of a recipe, beside its reference."""
    return Kto(recipe.kto or KtoRecipe(), reference)


def ask(recipe: Recipe) -> AskLogps:
    """Question to a reference."""
    return ask_logps


def changes_answers(recipe: Recipe) -> dict[str, Any]:
    """Keys of the recipe that change the reference's log-probs of an answer: none."""
    return {}


def precompute(feed: AnswerFeed, steps: Sequence[Ints], answered: Answered) -> None:
    """Give `feed` the reference's log-probs of the sequences of all steps, and of their mismatched pairs."""
    values = answered(own_answers(feed, np.unique(np.concatenate(steps))))
    feed.reference_IK = values.reshape(-1, 1)
    pairs = [np.stack([feed.items_of(step), partners_of(feed, step)], axis=1) for step in steps]
    pairs_Q2 = np.unique(np.concatenate(pairs), axis=0)
    of_mismatched = answered(_mismatched(feed, pairs_Q2))
    feed.reference_of_mismatched = dict(
        zip(map(tuple, pairs_Q2.tolist()), of_mismatched.tolist(), strict=True)
    )


def _mismatched(feed: AnswerFeed, pairs_Q2: Ints) -> Question:
    held = feed.sequences
    return Question(
        tokens=held.prompt[pairs_Q2[:, 0]] + held.answer[pairs_Q2[:, 1], 0],
        batch=lambda which: feed.mismatched(pairs_Q2[which, 0], pairs_Q2[which, 1]),
        places=lambda which: which,
        num_values=len(pairs_Q2),
        made_of=feed.made_of() | {"pairs": digest_of(pairs_Q2)},
    )


@dataclass(slots=True)
class Kto:
    """The method `kto`."""

    recipe: KtoRecipe
    reference: Reference | None
    baseline: Tensor = field(default_factory=lambda: torch.zeros(()))
    """z of the step at hand."""

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Measure z over the mismatched pairs of the whole step."""
        if self.recipe.loss != "kto":
            return
        items = ahead.feed.items_of(ahead.sequences)
        partners = partners_of(ahead.feed, ahead.sequences)
        partner_of = dict(zip(items.tolist(), partners.tolist(), strict=True))
        total = torch.zeros((), device=ahead.device)
        with torch.no_grad(), evaluating(model):
            for sequences in ahead.micro_batches:
                own = ahead.feed.items_of(sequences)
                matched = np.array([partner_of[item] for item in own.tolist()], np.int64)
                batch = ahead.feed.mismatched(own, matched, is_trial=ahead.is_trial).to(ahead.device)
                total += self._log_ratios(model, batch).sum()
        if ahead.num_ranks > 1:
            dist.all_reduce(total)
        found = kl_baseline(total / ahead.num_sharing, float(len(items)))
        if self.baseline.device != found.device:
            self.baseline = torch.zeros_like(found)
        # At one place: a captured pass reads it there.
        self.baseline.copy_(found)

    def loss(
        self, model: nn.Module, micro_batch: AnswerBatch, *, denominator: Count, want_stats: bool
    ) -> Loss:
        """Sum of the rows' losses over `denominator`; sums: rewards and log-probs by verdict, and z."""
        ratio_A = self._log_ratios(model, micro_batch)
        is_desirable_A = micro_batch.label_I > 0.5
        weights = {
            "num_rows": denominator,
            "beta": self.recipe.beta,
            "desirable_weight": self.recipe.desirable_weight,
            "undesirable_weight": self.recipe.undesirable_weight,
        }
        if self.recipe.loss == "kto":
            value = kto_loss(ratio_A, is_desirable_A, self.baseline, **weights)
        else:
            value = apo_zero_unpaired_loss(ratio_A, is_desirable_A, **weights)
        return Loss(value, self._sums(ratio_A.detach(), is_desirable_A) if want_stats else {})

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Rewards over the rows of their verdict; `kl` is z."""
        if not sums:
            return {}
        chosen, rejected = sums["num_desirable"], count - sums["num_desirable"]
        means = {"kl": sums["kl"] / count, "rewards/desirable_share": chosen / count}
        if chosen:
            means["rewards/chosen"] = sums["rewards/chosen"] / chosen
        if rejected:
            means["rewards/rejected"] = sums["rewards/rejected"] / rejected
        if chosen and rejected:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means

    def _log_ratios(self, model: nn.Module, batch: AnswerBatch) -> Tensor:
        """[A], log policy - log reference."""
        assert self.reference is not None, "KTO measures against a reference."
        return ask_logps(model, batch) - self.reference.logps(batch, ask_logps)

    def _sums(self, ratio_A: Tensor, is_desirable_A: Tensor) -> dict[str, Tensor]:
        reward_A = self.recipe.beta * ratio_A
        zero = torch.zeros_like(reward_A)
        return {
            "num_desirable": is_desirable_A.float().sum(),
            "rewards/chosen": torch.where(is_desirable_A, reward_A, zero).sum(),
            "rewards/rejected": torch.where(is_desirable_A, zero, reward_A).sum(),
            "kl": self.baseline * len(ratio_A),
        }


def ask_logps(model: nn.Module, batch: AnswerBatch) -> Tensor:
    """[A], log-probs of the answers under a scorer."""
    return answer_logps(model, batch).plain_A


def partners_of(feed: AnswerFeed, sequences: Ints) -> Ints:
    """For each item of a step, in the step's order, the item whose answer it is mismatched with; no two items
    of a sequence."""
    least = int(feed.weights[sequences].max(initial=1))
    return partners(feed.items_of(sequences), feed.prompts_of_items, least=least, num_items=feed.num_items)
