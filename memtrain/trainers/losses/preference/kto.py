"""Losses of unpaired feedback: each answer is desirable or not."""

# B rows of one micro-batch; r is log policy - log reference of an answer, summed over its tokens.

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.losses.head.linear import Count, over


def kl_baseline(mismatched_ratio_sum: Tensor, num_mismatched: float) -> Tensor:
    """max(0, mean of r over mismatched prompt-answer pairs): how far the policy has drifted, a constant.

    Sum and count run over the whole optimizer step and all ranks (the caller reduces them): then any
    micro-batch size gives the same baseline, one row included. TRL 1.16 takes the mean of a micro-batch,
    whose rows' answers rotate among themselves: it needs a batch above 1, read in sequence.
    Source: Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, the shared reference point z_0.
    """
    return (mismatched_ratio_sum.detach() / num_mismatched).clamp_min(0)


def kto_loss(
    ratio_B: Tensor,
    is_desirable_B: Tensor,
    baseline: Tensor,
    *,
    num_rows: Count,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Sum over rows of w_D (1 - sigmoid(beta (r - z))) or w_U (1 - sigmoid(beta (z - r))), / `num_rows`.

    z is `kl_baseline`. `num_rows` counts the whole optimizer step over all ranks.
    Source: Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, the definition of L_KTO (its constant left out).
    """
    gain_B = beta * (ratio_B - baseline)
    loss_B = torch.where(
        is_desirable_B, desirable_weight * (-gain_B).sigmoid(), undesirable_weight * gain_B.sigmoid()
    )
    return over(loss_B.sum(), num_rows)


def apo_zero_unpaired_loss(
    ratio_B: Tensor,
    is_desirable_B: Tensor,
    *,
    num_rows: Count,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Sum over rows of w_D (1 - sigmoid(beta r)) or w_U sigmoid(beta r), divided by `num_rows`; no baseline.

    Source: D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 7, its two terms on rows of their own.
    """
    return kto_loss(
        ratio_B,
        is_desirable_B,
        ratio_B.new_zeros(()),
        num_rows=num_rows,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
