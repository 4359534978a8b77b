"""Losses of Online DPO: pairs of whole completions against a reference."""

# B pairs of one micro-batch.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from memtrain.trainers.losses.head.linear import Count, over


def online_pair_loss(margin_B: Tensor, *, loss: str, beta: float, num_pairs: Count) -> Tensor:
    """Sum over pairs, divided by `num_pairs` of the whole optimizer step.

    `margin_B`: log p(chosen) / q(chosen) - log p(rejected) / q(rejected), each summed over the tokens of its
    completion. sigmoid: -log sigmoid(beta * margin). ipo: (margin - 1 / (2 beta))^2, of whole completions, as
    the paper and TRL's Online DPO have it (`dpo`'s ipo takes means over tokens, as TRL's DPO does).
    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Azar et al. 2023, arXiv:2310.12036, eq. 17 with
    beta for tau; on the policy's own completions: Guo et al. 2024, arXiv:2402.04792, algorithm 1; ipo:
    Calandriello et al. 2024, arXiv:2403.08635, section 3.
    """
    if loss == "sigmoid":
        loss_B = -F.logsigmoid(beta * margin_B)
    else:
        assert loss == "ipo", f"There is no loss {loss}."
        loss_B = (margin_B - 1.0 / (2.0 * beta)).square()
    return over(loss_B.sum(), num_pairs)
