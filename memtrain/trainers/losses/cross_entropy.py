"""The losses of supervised fine-tuning: cross-entropy over loss tokens, and dynamic fine-tuning."""

# N loss tokens of one micro-batch

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.losses.head.linear_nll import NllOptions
from memtrain.trainers.losses.head.request import NllRequest


def sft_request(
    targets_N: Tensor,
    *,
    num_tokens: float,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    want_stats: bool = False,
) -> NllRequest:
    """Asks for sum over tokens of -log p(target) / `num_tokens`, smoothed, plus z-loss (see `weighted_nll`).

    `num_tokens` counts the loss tokens of the whole optimizer step over all ranks, so that micro-batches
    and ranks add up to one large batch; where gradients are averaged over ranks, divide it by their number.
    """
    weights_N = torch.full(targets_N.shape, 1.0 / num_tokens, dtype=torch.float32, device=targets_N.device)
    options = NllOptions(label_smoothing, z_loss, want_stats, weight_of_all=1.0 / num_tokens)
    return NllRequest(targets_N, weights_N, options)


def dft_loss(logp_N: Tensor, *, num_tokens: float) -> Tensor:
    """Sum over tokens of -p * log p / `num_tokens`, p taken as a constant: unlikely tokens count less.

    `num_tokens` as in `sft_request`. The gradient is p times that of cross-entropy.
    Source: Wu et al. 2025, "On the Generalization of SFT", arXiv:2508.05629 (the
    token-level dynamic fine-tuning objective).
    """
    return -(logp_N.exp().detach() * logp_N).sum() / num_tokens
