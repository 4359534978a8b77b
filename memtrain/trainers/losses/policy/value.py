"""Value losses of PPO: the distance of each token's predicted return from the actual."""

# N tokens of answers

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.losses.head.linear import Count, over


def clipped_value_loss(
    value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float | None, num_tokens: Count
) -> Tensor:
    """Sum over tokens of max((v - R)^2, (clip(v, old +- clip) - R)^2) / 2, divided by `num_tokens`.

    `num_tokens` counts the whole optimizer step over all ranks. `clip` None: plain squared error.
    Source: Schulman et al. 2016 (GAE), arXiv:1506.02438, section 5 (the regression); the clipped form:
    Engstrom et al. 2020, arXiv:2005.12729, section 3 (value function clipping).
    """
    loss_N = (value_N - return_N).square()
    if clip is not None:
        near_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
        loss_N = torch.maximum(loss_N, (near_N - return_N).square())
    return over(0.5 * loss_N.sum(), num_tokens)
