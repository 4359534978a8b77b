"""Correction of the mismatch between the sampler's log-probs and the trainer's, for the same weights.

Another kernel, dtype or engine gives each token a slightly different probability; over a long answer the
ratios multiply. Ratios are constants of the update. They are wrong together with top-k, top-p or min-p:
then the sampler's probabilities are of another support, and kept mass ^ length multiplies every answer.
"""

# N scored tokens, answer after answer; A answers.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.recipes.sections.methods.online_base import MismatchMode
from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.policy.ratios import per_token
from memtrain.trainers.losses.quantile import quantiles

QUANTILES = (0.01, 0.5, 0.99)


class Mismatch(NamedTuple):
    """Factor of each token's loss, and facts of the raw ratios."""

    weight_N: Tensor
    """The corrected ratio at each token; that of its answer with the sequence modes."""
    is_outside_N: Tensor
    """bool: the raw ratio is outside the bounds, and truncated or masked."""


def mismatch(
    old_logp_N: Tensor,
    sampler_logp_N: Tensor,
    lengths_A: Tensor,
    mode: MismatchMode,
    *,
    lowest: float | None,
    highest: float | None,
) -> Mismatch:
    """exp(log p_trainer - log p_sampler), truncated to [lowest, highest], or 0 outside of it.

    By token, or of the whole answer (the product of its tokens). A token without a sampler log-prob (NaN)
    counts as ratio 1. `none` gives 1 everywhere.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (https://fengyao.notion.site/off-policy-rl): truncated importance sampling; masked by token and by
    sequence: Liu et al. 2025, "When speed kills stability" (https://yingru.notion.site).
    """
    difference_N = torch.nan_to_num(old_logp_N - sampler_logp_N, nan=0.0).detach()
    if mode == "none":
        return Mismatch(torch.ones_like(difference_N), torch.zeros_like(difference_N, dtype=torch.bool))
    if mode.startswith("sequence"):
        sums_A = sum_per_answer(difference_N, lengths_A)
        difference_N = per_token(sums_A, lengths_A, len(difference_N))
    raw_N = difference_N.exp()
    low = lowest if lowest is not None else 0.0
    high = highest if highest is not None else torch.inf
    is_outside_N = (raw_N < low) | (raw_N > high)
    if mode.endswith("truncate"):
        return Mismatch(raw_N.clamp(low, high), is_outside_N)
    return Mismatch(raw_N.masked_fill(is_outside_N, 0.0), is_outside_N)


def mismatch_facts(old_logp_N: Tensor, sampler_logp_N: Tensor) -> dict[str, float]:
    """Metrics of the raw difference d = log p_trainer - log p_sampler of a step's tokens.

    Means and quantiles are taken before any bound is applied: a jump of mean |d| says that the sampler's
    weights are stale.
    """
    known = ~(old_logp_N.isnan() | sampler_logp_N.isnan())
    difference = (old_logp_N - sampler_logp_N)[known].double()
    if not len(difference):
        return {}
    named = {
        f"mismatch/ratio_p{round(share * 100)}": math.exp(value)
        for share, value in zip(QUANTILES, quantiles(difference, QUANTILES), strict=True)
    }
    return {
        "mismatch/mean": difference.abs().mean().item(),
        "mismatch/max": difference.abs().max().item(),
        **named,
    }
