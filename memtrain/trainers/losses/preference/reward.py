"""The loss of a reward model: Bradley-Terry on pairs, with margin and centring."""

# B pairs of one micro-batch

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.head.linear import Count, over


def bradley_terry_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    num_pairs: Count,
    margin_B: Tensor | None = None,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Sum over pairs of -log sigmoid(R_w - R_l - margin) + c (R_w + R_l)^2, divided by `num_pairs`.

    Rewards are one number an answer. `num_pairs` counts the whole optimizer step over all ranks.
    Source: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023
    (Llama 2), arXiv:2307.09288, eq. 2; centring: Eisenstein et al. 2023, arXiv:2312.09244, its regularizer.
    """
    gap_B = chosen_B - rejected_B if margin_B is None else chosen_B - rejected_B - margin_B
    loss_B = -F.logsigmoid(gap_B)
    if center_coefficient:
        loss_B = loss_B + center_coefficient * (chosen_B + rejected_B).square()
    return over(loss_B.sum(), num_pairs)


def reward_sums(chosen_B: Tensor, rejected_B: Tensor) -> dict[str, Tensor]:
    """Detached sums over pairs, on the device: rewards, their margin, wins (a tie is half a win)."""
    with torch.no_grad():
        wins_B = (chosen_B > rejected_B).float() + 0.5 * (chosen_B == rejected_B).float()
        return {
            "rewards/chosen": chosen_B.sum(),
            "rewards/rejected": rejected_B.sum(),
            "rewards/margins": (chosen_B - rejected_B).sum(),
            "rewards/accuracies": wins_B.sum(),
        }
