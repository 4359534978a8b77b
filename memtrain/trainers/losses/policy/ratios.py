"""Parts of policy losses: importance ratios, KL estimates, and the tokens that count."""

# N scored tokens, answer after answer; A answers. logp: of the policy that learns; old: of the policy that
# the update started from; sampler: as recorded while sampling.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.quantile import quantiles

KlEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]


def per_token(value_A: Tensor, lengths_A: Tensor, num_tokens: int) -> Tensor:
    """The value of each answer at each of its tokens [N]."""
    return torch.repeat_interleave(value_A, lengths_A, output_size=num_tokens)


def mean_per_answer(value_N: Tensor, lengths_A: Tensor) -> Tensor:
    """Means over the tokens of each answer [A]; 0 for an answer without tokens."""
    return sum_per_answer(value_N, lengths_A) / lengths_A.clamp_min(1)


def log_ratio(logp_N: Tensor, old_logp_N: Tensor, lengths_A: Tensor, level: Level) -> Tensor:
    """log(policy / old policy) at each token [N].

    `sequence`: the mean of the answer's tokens at each of them (the log of the geometric mean).
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3 (token); Zheng et al. 2025 (GSPO),
    arXiv:2507.18071, eq. 7 (sequence).
    """
    difference_N = logp_N - old_logp_N
    if level == "token":
        return difference_N
    return per_token(mean_per_answer(difference_N, lengths_A), lengths_A, len(logp_N))


def kl_estimate(
    logp_N: Tensor, reference_N: Tensor, kind: KlEstimator, *, ratio_N: Tensor | None = None
) -> Tensor:
    """An estimate of KL(policy || reference) at each token [N], from the sampled token alone.

    With d = log p - log p_reference: k1 = d (unbiased, may be negative; alone its mean gradient is 0), k2 =
    d^2 / 2 (its gradient is unbiased), k3 = exp(-d) + d - 1 (unbiased, never negative; alone its gradient is
    that of KL(reference || policy)). `ratio_N`, the importance ratio to the policy that wrote the tokens,
    makes the gradients of k1 and k3 those of KL(policy || reference), and those of k2 wrong.

    Source: Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html);
    the ratio: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1 (unbiased KL estimate).
    """
    difference_N = logp_N - reference_N
    if kind == "k1":
        estimate_N = difference_N
    elif kind == "k2":
        estimate_N = 0.5 * difference_N.square()
    else:
        estimate_N = (-difference_N).exp() + difference_N - 1
    return estimate_N if ratio_N is None else estimate_N * ratio_N


def entropy_threshold(entropy_N: Tensor, share: float) -> Tensor:
    """The entropy (scalar) that the `share` of tokens with the highest one reach; +inf for no tokens.

    Taken over all tokens of an update, so that micro-batches and ranks do not move it.
    Source: Wang et al. 2025, arXiv:2506.01939, section 5 (the top 20 % carry the learning).
    """
    if not len(entropy_N):
        return torch.tensor(torch.inf)
    return torch.tensor(quantiles(entropy_N.float(), [1.0 - share])[0])


def keep_near_policy(
    logp_N: Tensor, old_logp_N: Tensor, lengths_A: Tensor, advantage_A: Tensor, *, limit: float
) -> Tensor:
    """bool [A]: answers to train on; disadvantageous answers only while they are near the policy.

    An answer of negative advantage is left out when the mean of log old - log policy over its tokens is above
    `limit`. A token without an old log-prob (NaN) is no evidence.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1 (off-policy sequence
    masking).
    """
    distance_N = torch.nan_to_num(old_logp_N - logp_N.detach(), nan=0.0)
    return (advantage_A >= 0) | (mean_per_answer(distance_N, lengths_A) <= limit)
