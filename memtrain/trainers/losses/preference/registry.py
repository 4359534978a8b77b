"""Preference losses by name: needs of each, weighted combinations, and the metrics of a batch."""

# B pairs

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from memtrain.recipes.sections.methods.pair_losses import PAIR_LOSSES, PairLossName
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.losses.preference import margin, pointwise
from memtrain.trainers.losses.preference import optimal_transport as transport
from memtrain.trainers.losses.preference import reference_free as free
from memtrain.trainers.losses.preference.pairs import PairKnobs, PairLogps

PerPair = Callable[[PairLogps, PairKnobs], Tensor]

FORMULAS: Mapping[PairLossName, PerPair] = {
    "sigmoid": margin.sigmoid,
    "sigmoid_norm": margin.sigmoid_norm,
    "hinge": margin.hinge,
    "ipo": margin.ipo,
    "exo_pair": margin.exo_pair,
    "robust": margin.robust,
    "discopop": margin.discopop,
    "nca_pair": pointwise.nca_pair,
    "bco_pair": pointwise.bco_pair,
    "sppo_hard": pointwise.sppo_hard,
    "apo_zero": pointwise.apo_zero,
    "apo_down": pointwise.apo_down,
    "aot": transport.aot,
    "aot_unpaired": transport.aot_unpaired,
    "simpo": free.simpo,
    "orpo": free.orpo,
    "cpo": free.cpo,
    "sft": free.sft,
}
"""The loss of each pair [B], by the name that its facts have in recipes/sections/methods/pair_losses.py."""


def preference_loss(
    logps: PairLogps,
    parts: Mapping[PairLossName, float],
    knobs: PairKnobs,
    *,
    num_pairs: Count,
    num_chosen_tokens: Count | None = None,
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
        loss = PAIR_LOSSES[name]
        loss_B = FORMULAS[name](logps, knobs)
        denominator = num_pairs
        if loss.counts_tokens:
            assert num_chosen_tokens is not None, f"{name} is divided by num_chosen_tokens"
            denominator = num_chosen_tokens
        elif pair_weights_B is not None:
            assert not loss.ranks_the_batch, f"{name} ranks the batch: pair weights have no pair to go to"
            loss_B = loss_B * pair_weights_B
        share = weight / denominator
        total = total + loss_B.sum() * (share.to(total.dtype) if isinstance(share, Tensor) else share)
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
