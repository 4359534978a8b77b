"""Surrogate losses of one token, minimised instead of the expected reward."""

# N scored tokens; advantage_N is the advantage of each token (of its answer, or its own).

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.policy.ratios import per_token

LOWEST_LOG_WEIGHT = math.log(1e-8)
"""Of a sequence's weight in `vespo`, as in its authors' code."""


class Clip(NamedTuple):
    """Bounds of the ratio beyond which its gradient stops."""

    low: float = 0.2
    """The ratio is clipped below 1 - low."""
    high: float = 0.2
    """The ratio is clipped above 1 + high (DAPO's clip-higher: 0.28)."""
    delta: float | None = None
    """Upper bound of the unclipped ratio too, which bounds the loss of bad answers."""


class GammaShape(NamedTuple):
    """Exponents of `vespo`'s weight, for answers of positive and of negative advantage."""

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0


def clipped_loss(ratio_N: Tensor, advantage_N: Tensor, clip: Clip) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) of each token [N]; with `delta` the first r is at most delta.

    Source: Schulman et al. 2017 (PPO), arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO),
    arXiv:2503.14476, eq. 8; delta: Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291, two-sided clipping.
    """
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    if clip.delta is not None:
        ratio_N = ratio_N.clamp(max=clip.delta)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def is_clipped(ratio_N: Tensor, advantage_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """bool [N] each: tokens whose gradient the lower bound stops, and the upper one."""
    return (ratio_N < 1 - clip.low) & (advantage_N < 0), (ratio_N > 1 + clip.high) & (advantage_N > 0)


def cispo_loss(ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, highest: float) -> Tensor:
    """-min(r, highest) A log p of each token [N], the weight a constant: no token's gradient is stopped.

    Source: MiniMax 2025 (CISPO), arXiv:2506.13585, section 3.1, with its upper bound only.
    """
    return -ratio_N.detach().clamp(max=highest) * advantage_N * logp_N


def sapo_loss(
    ratio_N: Tensor, advantage_N: Tensor, *, temperature_pos: float, temperature_neg: float
) -> Tensor:
    """-(4 / t) sigmoid(t (r - 1)) A of each token [N]: a gate that closes softly, t by the advantage's sign.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347, its gate f(r).
    """
    temperature_N = torch.where(advantage_N > 0, temperature_pos, temperature_neg)
    return -(4 / temperature_N) * (temperature_N * (ratio_N - 1)).sigmoid() * advantage_N


def vespo_loss(weight_N: Tensor, logp_N: Tensor, advantage_N: Tensor) -> Tensor:
    """-phi A log p of each token [N], phi = `gamma_weight` of its answer, a constant.

    Source: VESPO, arXiv:2602.10693, with the weight of `gamma_weight`.
    """
    return -weight_N.detach() * advantage_N * logp_N


def gamma_weight(
    log_ratio_N: Tensor,
    lengths_A: Tensor,
    advantage_A: Tensor,
    shape: GammaShape,
    *,
    mismatch_N: Tensor | None = None,
) -> Tensor:
    """w^k exp(lambda (1 - w)) of each answer at its tokens [N]: 1 at w = 1, small where w is far from it.

    w is the ratio of the whole answer, the product over its tokens; `mismatch_N`, the (corrected) ratio of
    trainer to sampler, is multiplied in. Logs are clamped to +-20 a token and [log 1e-8, 20] an answer.
    Source: VESPO, arXiv:2602.10693: the gamma kernel, normalised to 1 at w = 1.
    """
    with torch.no_grad():
        log_w_A = sum_per_answer(log_ratio_N.clamp(-20.0, 20.0), lengths_A)
        if mismatch_N is not None:
            log_w_A = log_w_A + sum_per_answer(mismatch_N.log().clamp(LOWEST_LOG_WEIGHT, 20.0), lengths_A)
        log_w_A = log_w_A.clamp(LOWEST_LOG_WEIGHT, 20.0)
        is_good_A = advantage_A >= 0
        k_A = torch.where(is_good_A, shape.k_pos, shape.k_neg)
        lambda_A = torch.where(is_good_A, shape.lambda_pos, shape.lambda_neg).clamp_min(1e-4)
        log_phi_A = lambda_A + k_A * log_w_A - lambda_A * log_w_A.exp()
        phi_A = log_phi_A.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return per_token(phi_A, lengths_A, len(log_ratio_N))
