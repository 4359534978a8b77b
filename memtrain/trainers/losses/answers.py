"""From log-probs of tokens to log-probs of answers: sums, length desensitisation, WPO's weights."""

# N scored tokens, answer after answer; A answers

from __future__ import annotations

import torch
from torch import Tensor


def sum_per_answer(value_N: Tensor, lengths_A: Tensor) -> Tensor:
    """Sums over the tokens of each answer [A]; an answer without tokens gives 0. Deterministic on CUDA too.

    `lengths_A` (int64) must add up to N; this is not checked, because checking would wait for the device.
    """
    return torch.segment_reduce(value_N, "sum", lengths=lengths_A, unsafe=True)


def place_in_answer(lengths_A: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(answer of each token, its place in that answer from 0), both int64 [N]."""
    answers_A = torch.arange(len(lengths_A), device=lengths_A.device)
    answer_N = torch.repeat_interleave(answers_A, lengths_A, output_size=num_tokens)
    starts_A = lengths_A.cumsum(0) - lengths_A
    return answer_N, torch.arange(num_tokens, device=lengths_A.device) - starts_A[answer_N]


def desensitised_logps(logp_N: Tensor, lengths_A: Tensor, shared_A: Tensor, *, alpha: float) -> Tensor:
    """Log-probs of answers with the tokens past `shared_A`, the pair's shorter length, scaled by `alpha`.

    alpha 1 is DPO, 0 cuts the longer answer to the length of the shorter.
    Source: Liu et al. 2024 (LD-DPO), arXiv:2409.06411, the likelihood of LD-DPO.
    """
    answer_N, place_N = place_in_answer(lengths_A, len(logp_N))
    is_tail_N = place_N >= shared_A[answer_N]
    return sum_per_answer(torch.where(is_tail_N, alpha * logp_N, logp_N), lengths_A)


def wpo_answer_weights(logp_N: Tensor, log_sum_squares_N: Tensor, lengths_A: Tensor) -> Tensor:
    """Likelihood that the policy writes each answer: exp(mean_t(log p_t - log sum_v p_v^2)), a constant.

    A pair's weight is the product of its two. Source: Zhou et al. 2024 (WPO), arXiv:2406.11827, eq. 2.
    """
    surprise_N = (logp_N - log_sum_squares_N).detach()
    return (sum_per_answer(surprise_N, lengths_A) / lengths_A.clamp_min(1)).exp()
