"""Preference losses by name: what each needs, weighted combinations, and what is reported of a batch."""

# B pairs

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.trainers.losses.preference import margin, pointwise
from memtrain.trainers.losses.preference import optimal_transport as transport
from memtrain.trainers.losses.preference import reference_free as free
from memtrain.trainers.losses.preference.pairs import PairKnobs, PairLogps


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A preference loss with its requirements."""

    per_pair: Callable[[PairLogps, PairKnobs], Tensor]
    needs_reference: bool = True
    takes_divergence: bool = False
    """Whether the divergence changes it; the others know only reverse KL."""
    needs_whole_batch: bool = False
    """Whether it ranks the pairs of a batch: accumulation then changes the loss."""
    counts_tokens: bool = False
    """Whether it is divided by chosen tokens instead of pairs."""


LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(margin.sigmoid, takes_divergence=True),
    "sigmoid_norm": PairLoss(margin.sigmoid_norm, takes_divergence=True),
    "hinge": PairLoss(margin.hinge, takes_divergence=True),
    "ipo": PairLoss(margin.ipo, takes_divergence=True),
    "exo_pair": PairLoss(margin.exo_pair, takes_divergence=True),
    "robust": PairLoss(margin.robust, takes_divergence=True),
    "discopop": PairLoss(margin.discopop, takes_divergence=True),
    "nca_pair": PairLoss(pointwise.nca_pair),
    "bco_pair": PairLoss(pointwise.bco_pair),
    "sppo_hard": PairLoss(pointwise.sppo_hard),
    "apo_zero": PairLoss(pointwise.apo_zero),
    "apo_down": PairLoss(pointwise.apo_down),
    "aot": PairLoss(transport.aot, needs_whole_batch=True),
    "aot_unpaired": PairLoss(transport.aot_unpaired, needs_whole_batch=True),
    "simpo": PairLoss(free.simpo, needs_reference=False),
    "orpo": PairLoss(free.orpo, needs_reference=False),
    "cpo": PairLoss(free.cpo, needs_reference=False),
    "sft": PairLoss(free.sft, needs_reference=False, counts_tokens=True),
}


def preference_loss(
    logps: PairLogps,
    parts: Mapping[str, float],
    knobs: PairKnobs,
    *,
    num_pairs: float,
    num_chosen_tokens: float | None = None,
    pair_weights_B: Tensor | None = None,
) -> Tensor:
    """Sum over named losses of weight * (sum over pairs) / `num_pairs`, a scalar.

    `num_pairs` (and `num_chosen_tokens`, for "sft") count the whole optimizer step over all ranks, so that
    accumulation equals one large batch; where gradients are averaged over ranks, divide by their number.
    `pair_weights_B` (WPO) multiply every loss of a pair but "sft", which is not a preference; the losses
    that need a whole batch belong to ranks, not pairs, and refuse them.

    Source: of each named loss, beside its function.
    """
    total = logps.chosen_B.new_zeros(())
    for name, weight in parts.items():
        loss = LOSSES[name]
        loss_B = loss.per_pair(logps, knobs)
        denominator = num_pairs
        if loss.counts_tokens:
            assert num_chosen_tokens is not None, f"{name} is divided by num_chosen_tokens"
            denominator = num_chosen_tokens
        elif pair_weights_B is not None:
            assert not loss.needs_whole_batch, f"{name} ranks the batch: pair weights have no pair to go to"
            loss_B = loss_B * pair_weights_B
        total = total + loss_B.sum() * (weight / denominator)
    return total


def preference_sums(logps: PairLogps, knobs: PairKnobs) -> dict[str, Tensor]:
    """Detached sums over pairs, on the device: rewards beta * (log policy - log reference), wins, log-probs.

    Without a reference the reward is beta * log p. A tie is half a win.
    """
    with torch.no_grad():
        is_free = logps.chosen_reference_B is None
        chosen_B = knobs.beta * (logps.chosen_B if is_free else logps.chosen_ratio_B)
        rejected_B = knobs.beta * (logps.rejected_B if is_free else logps.rejected_ratio_B)
        wins_B = (chosen_B > rejected_B).float() + 0.5 * (chosen_B == rejected_B).float()
        return {
            "rewards/chosen": chosen_B.sum(),
            "rewards/rejected": rejected_B.sum(),
            "rewards/margins": (chosen_B - rejected_B).sum(),
            "rewards/accuracies": wins_B.sum(),
            "logps/chosen": logps.chosen_B.sum(),
            "logps/rejected": logps.rejected_B.sum(),
        }
